// The page of a run: fetches the sections that change and replaces those that have. It computes no figure.
"use strict";

const LOOK_MS = 3000;
const STALE_MS = 15000;
const shown = new Map();
let heardAt = Date.now();

function replace(section) {
  const old = document.getElementById(section.id);
  const now = section.outerHTML;
  if (!old || shown.get(section.id) === now) return;
  shown.set(section.id, now);
  if (old.contains(document.activeElement) && document.activeElement !== document.body) return;  // a reader's place
  const open = [...old.querySelectorAll("details")].map((details) => details.open);
  [...section.querySelectorAll("details")].forEach((details, index) => { details.open = Boolean(open[index]); });
  old.replaceWith(section);
}

async function look() {
  if (!document.hidden) {
    const html = await fetch(`live${location.search}`, { signal: AbortSignal.timeout(STALE_MS) })
      .then((answer) => answer.ok ? answer.text() : null)
      .catch(() => null);  // also of an answer that breaks off: the next look comes in any case
    if (html !== null) {
      heardAt = Date.now();
      const parsed = new DOMParser().parseFromString(html, "text/html");
      for (const section of parsed.querySelectorAll("section[id]")) replace(document.importNode(section, true));
    }
  }
  const connection = document.getElementById("connection");
  const isStale = !document.hidden && Date.now() - heardAt > STALE_MS;
  connection.className = isStale ? "lost" : "";
  const words = isStale ? "this member no longer answers: another one can show the run" : "live";
  if (connection.textContent !== words) connection.textContent = words;
  setTimeout(look, LOOK_MS);
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const field = document.getElementById(button.dataset.copy);
  const output = button.parentElement.querySelector("output");
  field.select();
  const copied = navigator.clipboard ? await navigator.clipboard.writeText(field.value).then(() => true, () => false) : document.execCommand("copy");
  output.textContent = copied ? "copied" : "selected: copy it with Ctrl-C";
});
document.addEventListener("visibilitychange", () => { heardAt = Date.now(); });
setTimeout(look, LOOK_MS);
