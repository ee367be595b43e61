// One step in lanes, on a canvas: wheel, pinch, buttons and keys zoom; dragging and arrow keys move.
(function () {
  const report = window.lowtideReport;
  const canvas = document.getElementById("timeline");
  if (!canvas || !report.data.steps.length) return;
  const steps = report.data.steps;
  const stepChoice = document.getElementById("step-choice");
  const rankChoice = document.getElementById("rank-choice");
  const reading = document.getElementById("timeline-reading");
  const help = reading.textContent;
  const laneHeight = 20, rankHeight = 22, axisHeight = 26, leastSpan = 20;  // the last in microseconds
  let step, from = 0, to = 1, rows = [];

  const labels = () => (canvas.clientWidth < 600 ? 66 : 92);
  const plotWidth = () => Math.max(50, canvas.clientWidth - labels() - 8);
  const whole = () => Math.max(1, step.seconds * 1e6);

  function chooseStep() {
    step = steps[Number(stepChoice.value)];
    const before = rankChoice.value;
    rankChoice.textContent = "";
    const all = document.createElement("option");
    all.value = "all";
    all.textContent = "all";
    rankChoice.append(all);
    for (const rank of step.ranks) {
      const option = document.createElement("option");
      option.value = String(rank.rank);
      option.textContent = String(rank.rank);
      rankChoice.append(option);
    }
    const usual = step.ranks.length > 4 ? String(step.ranks[0].rank) : "all";
    rankChoice.value = [...rankChoice.options].some((o) => o.value === before) ? before : usual;
    rankChoice.parentElement.hidden = step.ranks.length < 2;
    from = 0;
    to = whole();
    layOut();
  }

  function layOut() {
    // every row of the picture: a heading of a rank, or one lane of it
    rows = [];
    const shown = step.ranks.filter((rank) => rankChoice.value === "all" || String(rank.rank) === rankChoice.value);
    let y = 4;
    for (const rank of shown) {
      if (step.ranks.length > 1) {
        rows.push({ y, height: rankHeight, title: "rank " + rank.rank });
        y += rankHeight;
      }
      step.lanes.forEach((lane, number) => {
        rows.push({ y, height: laneHeight, lane, rank, spans: rank.rows.filter((row) => row[2] === number) });
        y += laneHeight;
      });
    }
    canvas.style.height = y + axisHeight + "px";
    draw();
  }

  function view(begin, end) {
    const span = Math.min(Math.max(end - begin, leastSpan), whole());
    const middle = (begin + end) / 2;
    from = Math.min(Math.max(0, middle - span / 2), whole() - span);
    to = from + span;
    draw();
  }

  function zoom(factor, at) {
    const fixed = at === undefined ? (from + to) / 2 : at;
    const span = Math.min(Math.max((to - from) * factor, leastSpan), whole());
    const share = (fixed - from) / (to - from);
    view(fixed - share * span, fixed + (1 - share) * span);
  }

  const move = (share) => view(from + share * (to - from), to + share * (to - from));
  const toX = (time) => labels() + (time - from) / (to - from) * plotWidth();
  const toTime = (x) => from + (x - labels()) / plotWidth() * (to - from);

  function draw() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const scale = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = parseFloat(canvas.style.height);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.fillStyle = colour("--paper");
    pen.fillRect(0, 0, width, height);
    pen.textBaseline = "middle";
    const ticks = ticksBelow(pen, colour, height - axisHeight);
    const font = (size, weight) => { pen.font = weight + " " + size + "px system-ui, sans-serif"; };
    for (const row of rows) {
      if (row.title) {
        font(12, 600);
        pen.fillStyle = colour("--ink");
        pen.fillText(row.title, 6, row.y + row.height / 2 + 2);
        continue;
      }
      font(11, 400);
      pen.fillStyle = colour("--dim");
      pen.fillText(row.lane.name, 6, row.y + row.height / 2);
      pen.fillStyle = colour("--track");
      pen.globalAlpha = 0.6;
      pen.fillRect(labels(), row.y + 2, plotWidth(), row.height - 4);
      pen.globalAlpha = 1;
      pen.save();
      pen.beginPath();
      pen.rect(labels(), row.y, plotWidth(), row.height);
      pen.clip();
      drawSpans(pen, row);
      pen.restore();
    }
    ticks();
  }

  function drawSpans(pen, row) {
    const shown = row.spans
      .map((span) => ({ span, begin: toX(span[0]), end: toX(span[0] + span[1]) }))
      .filter(({ begin, end }) => begin <= canvas.clientWidth && end >= labels());
    pen.fillStyle = row.lane.colour;
    for (const { begin, end } of shown) {
      const size = end - begin;
      pen.fillRect(begin, row.y + 2, Math.max(size - (size > 3 ? 0.6 : 0), 0.6), row.height - 4);
    }
    pen.fillStyle = "#ffffff";
    shown.forEach((one, number) => {
      const [left, right] = freePart(one, shown, number);
      const room = Math.floor((right - left - 8) / 6.6);  // letters
      if (room <= 5) return;
      const name = (step.verbs[one.span[3]] + " " + (row.rank.names[one.span[4]] || "")).trim();
      pen.fillText(name.length > room ? name.slice(0, room - 1) + "…" : name, left + 4, row.y + row.height / 2 + 0.5);
    });
  }

  function freePart(one, shown, number) {
    // the longest part of a span that no later one lies on: an update has chunks inside, a backward pass a second forward
    const last = Math.min(one.end, labels() + plotWidth());
    let from = Math.max(one.begin, labels()), best = [from, from];
    for (let next = number + 1; next < shown.length && shown[next].begin < last; next++) {
      if (shown[next].begin - from > best[1] - best[0]) best = [from, shown[next].begin];
      from = Math.max(from, shown[next].end);
    }
    return last - from > best[1] - best[0] ? [from, last] : best;
  }

  function ticksBelow(pen, colour, y) {
    // lines now, behind everything; the words for them when all is drawn
    const rough = (to - from) / Math.max(2, plotWidth() / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const [unit, size] = to - from >= 2e6 ? ["s", 1e6] : to - from >= 2e3 ? ["ms", 1e3] : ["µs", 1];
    const ticks = [];
    for (let tick = Math.ceil(from / every) * every; tick <= to; tick += every) ticks.push(tick);
    pen.fillStyle = colour("--line");
    for (const tick of ticks) pen.fillRect(toX(tick), 0, 1, y + 4);
    return () => {
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = colour("--dim");
      pen.textAlign = "center";
      for (const tick of ticks) {
        const x = toX(tick);
        if (x < canvas.clientWidth - 16) pen.fillText(Number((tick / size).toPrecision(6)).toString(), x, y + 14);
      }
      pen.textAlign = "left";
      pen.fillText(unit, 6, y + 14);
    };
  }

  function spanAt(x, y) {
    const row = rows.find((candidate) => candidate.lane && y >= candidate.y && y < candidate.y + candidate.height);
    if (!row) return null;
    const time = toTime(x), slack = 2 / plotWidth() * (to - from);
    const span = row.spans.find((s) => time >= s[0] - slack && time <= s[0] + s[1] + slack);
    return span ? { row, span } : null;
  }

  function say(found) {
    if (!found) {
      reading.textContent = help;
      return;
    }
    const { row, span } = found;
    const parts = [
      step.ranks.length > 1 ? "rank " + row.rank.rank : "",
      (step.verbs[span[3]] + " " + (row.rank.names[span[4]] || "")).trim(),
      report.words(span[1] / 1e6, "seconds"),
      span[5] ? report.words(span[5], "bytes") : "",
      "from " + report.words(span[0] / 1e6, "seconds"),
    ];
    reading.textContent = parts.filter(Boolean).join(" · ");
  }

  canvas.addEventListener("wheel", (event) => {
    const factor = Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.002)));
    if (factor > 1 && to - from >= whole()) return;  // all is shown: the page scrolls on
    zoom(factor, toTime(event.offsetX));
    event.preventDefault();
  }, { passive: false });

  const fingers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.offsetX);
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (before === undefined) {
      say(spanAt(event.offsetX, event.offsetY));
      return;
    }
    if (fingers.size === 1) {
      move(-(event.offsetX - before) / plotWidth());
    } else {
      const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, x]) => x);
      const was = Math.abs(before - other), is = Math.abs(event.offsetX - other);
      if (was > 5 && is > 5) zoom(was / is, toTime(other));
    }
    fingers.set(event.pointerId, event.offsetX);
  });
  for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, (event) => fingers.delete(event.pointerId));
  canvas.addEventListener("dblclick", () => view(0, whole()));
  canvas.addEventListener("keydown", (event) => {
    const keys = {
      "+": () => zoom(0.6), "=": () => zoom(0.6), ArrowUp: () => zoom(0.6), "-": () => zoom(1 / 0.6), ArrowDown: () => zoom(1 / 0.6),
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), 0: () => view(0, whole()), Home: () => view(0, whole()),
    };
    if (event.key in keys && !event.ctrlKey && !event.metaKey) {
      keys[event.key]();
      event.preventDefault();
    }
  });
  document.getElementById("zoom-in").addEventListener("click", () => zoom(0.6));
  document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  document.getElementById("zoom-all").addEventListener("click", () => view(0, whole()));
  stepChoice.addEventListener("change", chooseStep);
  rankChoice.addEventListener("change", layOut);
  new ResizeObserver(() => draw()).observe(canvas.parentElement);
  report.onColours(() => draw());
  chooseStep();
  report.timeline = { view: () => [from, to], whole, rows: () => rows.length };
})();
