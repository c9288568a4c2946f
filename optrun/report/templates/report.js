for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500);
});
const key = text => {
  const word = text.trim(), first = word.replace(/\u2212/g, "-").replace(/[,\u00d7\u2265<#]/g, "").trim();
  const value = parseFloat(first); return isNaN(value) ? (word === "\u2013" ? null : word.toLowerCase()) : value;
};
for (const head of document.querySelectorAll("table.sortable th")) head.addEventListener("click", () => {
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const order = [...body.rows].map(row => [key(row.cells[column].textContent), row]);
  order.sort(([a], [b]) => a === null ? 1 : b === null ? -1 : (down ? -1 : 1) *
    (typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1));
  body.append(...order.map(([, row]) => row));
});
