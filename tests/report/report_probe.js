// Measures the pages in the frames of its document; see test_report_layout.py.
const inside = (a, b, by) => a.left >= b.left - by && a.right <= b.right + by
  && a.top >= b.top - by && a.bottom <= b.bottom + by;
const meet = (a, b, by) => a.left < b.right - by && b.left < a.right - by
  && a.top < b.bottom - by && b.top < a.bottom - by;
const rgb = text => (text.match(/[\d.]+/g) || []).map(Number);
const light = c => { const [r, g, b] = c.map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const contrast = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
function measured(frame) {
  const d = frame.contentDocument, found = [];
  const say = (what, ...nodes) => found.push(what + ": " + nodes.map(n => n.textContent.trim().slice(0, 40)).join(" | "));
  const height = d.documentElement.scrollHeight;
  for (const each of d.querySelectorAll("details")) each.open = true;
  const style = node => frame.contentWindow.getComputedStyle(node), box = node => node.getBoundingClientRect();
  if (d.documentElement.scrollWidth > frame.clientWidth) found.push("page is " + d.documentElement.scrollWidth + " wide");
  for (const svg of d.querySelectorAll("svg")) {
    const whole = box(svg), texts = [...svg.querySelectorAll("text")], names = texts.filter(t => t.classList.contains("name"));
    const points = [...svg.querySelectorAll(".mark")].filter(p => p.parentNode === svg);
    for (const t of texts) if (!inside(box(t), whole, 1)) say("text leaves its picture", t);
    for (const name of names) {
      for (const p of points) if (meet(box(name), box(p), 0.5)) say("label on a point", name, p);
      for (const t of texts) if (t !== name && meet(box(name), box(t), 0.5)) say("label on a text", name, t);
    }
    const others = texts.filter(t => !t.classList.contains("name"));
    others.forEach((t, i) => others.slice(i + 1).forEach(u => { if (meet(box(t), box(u), 1)) say("text on a text", t, u); }));
    const cells = [...svg.querySelectorAll("rect.cell")];
    for (const cell of cells) {
      const number = cell.nextElementSibling;
      const n = box(number), c = box(cell);
      if (n.left < c.left - 0.5 || n.right > c.right + 0.5) say("number wider than its cell", number);
    }
    if (names.length && names.length !== points.length) say("labels and points", svg);
  }
  const walk = d.createTreeWalker(d.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walk.nextNode());) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || parent.closest("svg")) continue;
    const around = parent.closest(".scroll") ? null : parent.closest("section, figure, details, main");
    const range = d.createRange();
    range.selectNodeContents(node);
    for (const r of range.getClientRects()) {
      const b = around && box(around);
      if (b && (r.left < b.left - 1 || r.right > b.right + 1)) { say("text leaves its box", node); break; }
    }
    const ground = parent.closest("mark, section, figure, details, body");
    if (contrast(rgb(style(parent).color), rgb(style(ground).backgroundColor)) < 4.5) say("text is hard to read", node);
  }
  for (const each of d.querySelectorAll(".scroll")) if (!inside(box(each), box(each.parentElement), 0)) say("table leaves its box", each);
  const panel = rgb(style(d.querySelector("section")).backgroundColor);
  for (const t of d.querySelectorAll("svg text:not(.number)"))
    if (contrast(rgb(style(t).fill), panel) < 4.5) say("text is hard to read", t);
  for (const m of d.querySelectorAll("svg .mark")) if (contrast(rgb(style(m).stroke), panel) < 3) say("point is hard to see", m);
  return {found: [...new Set(found)], height, dark: light(panel) < 0.2, pictures: d.querySelectorAll("svg").length,
    labels: d.querySelectorAll("svg text.name").length};
}
onload = () => { document.getElementById("out").textContent =
  JSON.stringify([...document.querySelectorAll("iframe")].map(measured)); };
