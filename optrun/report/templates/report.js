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
const tip = document.createElement("div");
tip.className = "tip"; tip.setAttribute("role", "status"); tip.hidden = true; document.body.append(tip);
for (const svg of document.querySelectorAll("figure svg")) {
  const marks = [...svg.querySelectorAll("circle.m")]; let on = null;
  if (!marks.length) continue;
  for (const mark of marks) {  // ours takes the place of the browser's own tip
    const title = mark.querySelector("title"); mark.dataset.told = title.textContent; title.remove();
  }
  const seen = () => marks.filter(mark => getComputedStyle(mark).display !== "none");
  const tell = mark => {
    if (on) on.classList.remove("on");
    on = mark; tip.hidden = !mark;
    if (!mark) return;
    mark.classList.add("on"); tip.textContent = mark.dataset.told;
    const at = mark.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const left = Math.min(Math.max(4, at.left + at.width / 2 - size.width / 2), innerWidth - size.width - 4);
    tip.style.left = `${left}px`; tip.style.top = `${at.top > size.height + 8 ? at.top - size.height - 6 : at.bottom + 6}px`;
  };
  const nearest = event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = null, least = 26 ** 2;
    for (const mark of seen()) {
      const away = (mark.cx.baseVal.value - point.x) ** 2 + (mark.cy.baseVal.value - point.y) ** 2;
      if (away < least) { best = mark; least = away; }
    }
    tell(best);
  };
  svg.addEventListener("pointermove", nearest); svg.addEventListener("pointerdown", nearest);
  svg.addEventListener("pointerleave", () => tell(null)); svg.addEventListener("blur", () => tell(null));
  svg.tabIndex = 0;
  svg.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") tell(null);
    if (!step) return;
    const all = seen(), here = all.indexOf(on); event.preventDefault();
    if (all.length) tell(all[here < 0 ? (step > 0 ? 0 : all.length - 1) : (here + step + all.length) % all.length]);
  });
}
addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
