
// --- a page that follows runs: it asks every second for what is new, and changes only what has changed ---

const PAUSE = 1000; // milliseconds; live.py knows how long a page may be silent
let version = "", failed = 0;

function morph(old, fresh) {
  // What the reader did stays: a folded text that is open, the order of a table, the focus, a zoomed chart.
  if (old.nodeName !== fresh.nodeName || (old.id || "") !== (fresh.id || "")) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  const chart = fresh.classList.contains("chart"); // inside it is plotly's
  for (const { name, value } of [...fresh.attributes])
    if (!(chart && name === "class") && name !== "open" && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (chart) return;
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name) && name !== "open" && name !== "aria-sort") old.removeAttribute(name);
  let at = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const same = child.id ? [...old.children].find((other) => other.id === child.id) : at?.id ? null : at;
    if (same) {
      if (same === at) at = at.nextSibling;
      else old.insertBefore(same, at);
      morph(same, child);
    } else old.insertBefore(child, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

function take(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html");
  const keys = () => [...document.querySelectorAll(".legend button")];
  const names = new Set(keys().filter((key) => hidden.has(Number(key.dataset.method))).map((key) => key.textContent));
  const seen = [...document.querySelectorAll("h2, h3, table")].find((one) => one.getBoundingClientRect().bottom > 0);
  const top = seen?.getBoundingClientRect().top;
  document.title = fresh.title;
  for (const part of ["#live", "header div", "nav", "main"])
    morph(document.querySelector(part), fresh.querySelector(part));
  figures = JSON.parse(fresh.getElementById("figures").textContent);
  hidden.clear(); // a new run may have moved the others
  for (const key of keys()) if (names.has(key.textContent)) hidden.add(Number(key.dataset.method));
  press();
  document.querySelectorAll("th[aria-sort]").forEach(sort);
  if (scrollY && seen?.isConnected) scrollBy(0, seen.getBoundingClientRect().top - top); // what is read stays in place
  for (const [place, figure] of [...drawn]) {
    if (!place.isConnected) Plotly.purge(place);
    else if (JSON.stringify(figure) === JSON.stringify(figures[place.dataset.chart])) continue;
    drawn.delete(place);
  }
  drawAll();
}

async function follow() {
  try {
    const answer = await fetch("/update", { cache: "no-store", headers: version ? { "If-None-Match": version } : {} });
    if (answer.ok) {
      take(await answer.text());
      version = answer.headers.get("ETag");
    } else if (answer.status !== 304) throw new Error(answer.statusText);
    failed = 0;
  } catch {
    failed += 1;
  }
  const live = document.getElementById("live");
  if (failed > 2) {
    live.className = "over";
    live.querySelector("b").textContent = "offline";
    live.querySelector("bdi").prepend("No longer updated, since whatever served this page has ended. The last state: ");
  } else if (!live.classList.contains("over")) setTimeout(follow, PAUSE);
}

follow();
