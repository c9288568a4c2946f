for (const button of document.querySelectorAll("button.copy")) button.addEventListener("click", async () => {
  await navigator.clipboard.writeText(button.previousElementSibling.textContent);
  button.textContent = "copied"; setTimeout(() => { button.textContent = "copy"; }, 1500);
});
const key = text => {
  const word = text.trim(), first = word.replace(/\u2212/g, "-").replace(/[,\u00d7\u2265<#]/g, "").trim();
  const value = parseFloat(first); return isNaN(value) ? (word === "\u2013" ? null : word.toLowerCase()) : value;
};
const compare = (a, b) => a === null ? 1 : b === null ? -1 : typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  let column = -1, sign = 1;
  heads.forEach((head, index) => head.addEventListener("click", () => {
    sign = column === index ? -sign : 1; column = index;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    const value = row => key(row.cells[column].textContent);
    const by = (a, b) => { const [x, y] = [value(a), value(b)]; return x === null || y === null ? compare(x, y) : sign * compare(x, y); };
    body.replaceChildren(...rows.sort(by));
  }));
}
