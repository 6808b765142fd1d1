"use strict";
// Shows a matrix cell's reason under the table, for the pointer and for the arrow keys.
(function () {
  const table = document.querySelector(".matrix");
  const tip = document.getElementById("tip");
  if (!table || !tip) return;
  const rows = Array.from(table.tBodies[0].rows);
  const first = table.querySelector("td[data-tip]");
  if (first) first.tabIndex = 0;
  function show(target) {
    const cell = target.closest("[data-tip]");
    if (cell) tip.textContent = cell.dataset.tip;
  }
  table.addEventListener("mouseover", (event) => show(event.target));
  table.addEventListener("focusin", (event) => show(event.target));
  table.addEventListener("keydown", (event) => {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    const cell = event.target.closest("td");
    if (!move || !cell) return;
    const row = rows[rows.indexOf(cell.parentElement) + move[0]];
    const next = row && row.cells[cell.cellIndex + move[1]];
    if (!next || !next.dataset.tip) return;
    event.preventDefault();
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
})();
