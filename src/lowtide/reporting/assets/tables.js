// Tables are sorted by their headings: once by size, largest first, or by name; again turns it round.
(function () {
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const rows = [...body.rows];
        const number = rows.some((row) => typeof value(row, column) === "number");
        const usual = number ? "descending" : "ascending";
        const other = number ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === usual ? other : usual;
        const sign = order === "ascending" ? 1 : -1;
        rows.sort((a, b) => {
          const [x, y] = [value(a, column), value(b, column)];
          return sign * (typeof x === "number" && typeof y === "number" ? x - y
            : String(x).localeCompare(String(y), undefined, { numeric: true }));
        });
        heads.forEach((h) => h.setAttribute("aria-sort", h === head ? order : "none"));
        body.append(...rows);
      });
    });
  }
})();
