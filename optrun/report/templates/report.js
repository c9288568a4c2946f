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
  const text = (row, column) => row.cells[column].textContent.trim();
  let column = -1, sign = 1, words = [], group = -1;
  const hit = (row, word) => {  // lr=2e-3 means the column lr, any other word the whole row
    const [name, ...rest] = word.split("="), at = rest.length ? heads.findIndex(head => head.textContent.toLowerCase() === name) : -1;
    return at < 0 ? row.textContent.toLowerCase().includes(word) : key(text(row, at)) === key(rest.join("="));
  };
  const lay = () => {
    const left = rows.filter(row => words.every(word => hit(row, word)));
    const by = at => (a, b) => { const [x, y] = [key(text(a, at)), key(text(b, at))]; return x === null || y === null ? compare(x, y) : sign * compare(x, y); };
    if (column >= 0) left.sort(by(column));
    const groups = new Map();
    for (const row of left) { const name = group < 0 ? "" : text(row, group); groups.set(name, [...(groups.get(name) ?? []), row]); }
    body.replaceChildren(...[...groups].flatMap(([name, members]) => {
      if (group < 0) return members;
      const line = document.createElement("tr"), head = document.createElement("th");
      line.className = "group"; head.colSpan = heads.length; head.textContent = `${heads[group].textContent} ${name} (${members.length})`;
      line.append(head); return [line, ...members];
    }));
    return left.length;
  };
  heads.forEach((head, index) => head.addEventListener("click", () => {
    sign = column === index ? -sign : 1; column = index;
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending"); lay();
  }));
  if (!table.classList.contains("filter") || rows.length < 2) continue;
  const bar = document.createElement("div"), box = document.createElement("input"), select = document.createElement("select");
  const shown = document.createElement("span"); bar.className = "bar"; box.type = "search"; box.placeholder = "filter, such as adamw lr=2e-3";
  box.setAttribute("aria-label", "filter rows"); select.setAttribute("aria-label", "group rows by");
  select.append(new Option("group by", -1), ...heads.map((head, index) => new Option(head.textContent, index)));
  const change = () => {
    words = box.value.toLowerCase().split(/\s+/).filter(Boolean); group = Number(select.value);
    const left = lay(); shown.textContent = left < rows.length ? `${left} of ${rows.length}` : "";
  };
  box.addEventListener("input", change); select.addEventListener("change", change);
  bar.append(box, select, shown); table.parentNode.before(bar);
}
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
