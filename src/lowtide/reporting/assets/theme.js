"use strict";
// Colours: as the system says, or as the reader chose; the choice is kept where the browser allows it.
window.lowtideReport = (function () {
  const names = ["auto", "light", "dark"];
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const listeners = [];

  function kept() {
    try { return localStorage.getItem("lowtide-colours"); } catch (error) { return null; }
  }

  function apply(name) {
    if (name === "auto") root.removeAttribute("data-theme"); else root.dataset.theme = name;
    button.textContent = "colours: " + name;
    button.setAttribute("aria-label", "Colours: " + (name === "auto" ? "as the system" : name));
    button.dataset.name = name;
    listeners.forEach((listener) => listener());
  }

  button.addEventListener("click", () => {
    const next = names[(names.indexOf(button.dataset.name) + 1) % names.length];
    try { localStorage.setItem("lowtide-colours", next); } catch (error) { /* a page from a file may keep nothing */ }
    apply(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => listeners.forEach((listener) => listener()));
  apply(names.includes(kept()) ? kept() : "auto");

  const data = JSON.parse(document.getElementById("lowtide-data").textContent);

  function bytes(value) {
    // as size_text of planning/text.py says it: one number has one name on a page
    const units = [["PiB", 2 ** 50, 1, 2], ["TiB", 2 ** 40, 1, 2], ["GiB", 2 ** 30, 0.0995, 2], ["MiB", 2 ** 20, 1, 1], ["KiB", 2 ** 10, 1, 1]];
    for (const [unit, size, least, digits] of units) {
      if (Math.abs(value) >= least * size) return (value / size).toFixed(digits) + " " + unit;
    }
    return value.toFixed(0) + " B";
  }

  function seconds(value) {
    if (value >= 3600) return Math.floor(value / 3600) + " h " + String(Math.floor((value % 3600) / 60)).padStart(2, "0") + " min";
    if (value >= 100) return value.toFixed(0) + " s";
    if (value >= 1) return value.toFixed(2) + " s";
    return value >= 1e-3 ? (value * 1e3).toFixed(1) + " ms" : (value * 1e6).toFixed(0) + " µs";
  }

  function words(value, unit) {
    if (unit === "bytes") return bytes(value);
    if (unit === "percent") return value.toFixed(0) + " %";
    return unit === "seconds" ? seconds(value) : Number(value.toPrecision(5)).toString();
  }

  return { data, words, onColours: (listener) => listeners.push(listener) };
})();
