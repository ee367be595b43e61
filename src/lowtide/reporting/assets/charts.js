// A line at the pointer, and the values there in words. Arrow keys move it, for those who do not point.
(function () {
  const { data, words } = window.lowtideReport;
  const left = 58, right = 14;  // the frame of every chart, as charts.py draws it

  function nearest(xs, wanted) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < wanted) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - wanted) <= Math.abs(xs[high] - wanted) ? low : high;
  }

  function say(target, label, value) {
    const bold = document.createElement("b");
    bold.textContent = value;
    target.append(label + " ", bold, "   ");
  }

  function show(figure, chart, index) {
    figure.dataset.index = index;
    const x = chart.x[index];
    for (const svg of figure.querySelectorAll("svg")) {
      const box = svg.viewBox.baseVal;
      const at = left + (x - chart.from) / (chart.to - chart.from) * (box.width - left - right);
      let line = svg.querySelector(".lt-cursor");
      if (!line) {
        line = document.createElementNS("http://www.w3.org/2000/svg", "line");
        line.setAttribute("class", "lt-cursor");
        svg.append(line);
      }
      line.setAttribute("x1", at);
      line.setAttribute("x2", at);
      line.setAttribute("y1", 8);
      line.setAttribute("y2", box.height - 26);
    }
    const reading = figure.querySelector(".reading");
    reading.textContent = "";
    say(reading, chart.axis === "time" ? "after" : "step", chart.axis === "time" ? words(x, "seconds") : String(x));
    let sum = 0;
    for (const series of chart.series) {
      const value = series.values[index];
      if (value === null || (chart.stacked && value === 0)) continue;
      sum += value;
      say(reading, series.name, words(value, chart.unit));
    }
    if (chart.stacked) say(reading, "together", words(sum, chart.unit));
  }

  for (const figure of document.querySelectorAll("figure.chart")) {
    const chart = data.charts[figure.dataset.key];
    if (!chart || !chart.x.length) continue;
    figure.addEventListener("pointermove", (event) => {
      const svg = event.target.closest("svg");
      if (!svg) return;
      const box = svg.getBoundingClientRect();
      const width = svg.viewBox.baseVal.width;
      const share = ((event.clientX - box.left) / box.width * width - left) / (width - left - right);
      show(figure, chart, nearest(chart.x, chart.from + share * (chart.to - chart.from)));
    });
    figure.addEventListener("keydown", (event) => {
      const last = chart.x.length - 1;
      const now = figure.dataset.index === undefined ? -1 : Number(figure.dataset.index);
      const far = Math.max(1, Math.round(last / 10));
      const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, PageUp: now - far, PageDown: now + far, Home: 0, End: last };
      if (event.key in moves && event.target === figure) {
        show(figure, chart, Math.min(last, Math.max(0, moves[event.key])));
        event.preventDefault();
      }
    });
  }
})();
