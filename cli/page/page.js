// The page of `peer dashboard`: draws what the server reports each second. It computes no figure that the peer does not report.
"use strict";

const TOKEN = new URLSearchParams(location.search).get("token");
const STALE_MS = 5000;
const CHARTS = [
  { title: (status) => status.program ? "loss" : "loss, nats per token", lines: [["training", "loss", "blue"], ["held out", null, "violet"]] },
  { title: (status) => `${status.unit} a second`, lines: [["a second", "tokens_per_second", "green"]] },
  { title: () => "meetings", lines: [["completed", "meetings", "green"], ["failed", "failed", "red", "dash"]] },
  { title: (status) => status.stage ? "megabytes up" : "megabytes up, in meetings", lines: [["up", "sent", "blue"]], scale: 1e-6 },
  { title: (status) => status.stage ? "megabytes down" : "megabytes down, in meetings", lines: [["down", "received", "violet"]], scale: 1e-6 },
  { title: () => "blocked, % of training time", lines: [["blocked", "blocked_share", "red"]], scale: 100 },
];
const SIGNS = {  // beside the colours, for those who cannot tell them apart
  training: "\u25cf", serving: "\u25cf", done: "\u2713", joining: "\u2026", starting: "\u2026", finishing: "\u2026",
  waiting: "\u2026", paused: "II", leaving: "\u2192", left: "\u25cb", failed: "!", silent: "?",
};
const COPIED = {  // rows that others ask for
  "addresses": (status) => status.addresses.join("\n"), "run id": (status) => status.run_id, "peer id": (status) => status.peer_id,
};
const cards = new Map();
const dark = matchMedia("(prefers-color-scheme: dark)");
let heardAt = 0;

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const element = (tag, text, attributes = {}) => Object.assign(document.createElement(tag), { textContent: text }, attributes);
const place = (path) => `${path}?token=${encodeURIComponent(TOKEN)}`;

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function replaceIfNew(node, key, children) {
  if (node.dataset.shown === key) return;
  node.dataset.shown = key;
  node.replaceChildren(...children());
}

function newCard(number) {
  const card = document.getElementById("peer").content.firstElementChild.cloneNode(true);
  const dialog = card.querySelector("dialog");
  for (const button of card.querySelectorAll("[data-verb]")) {
    button.addEventListener("click", () => {
      if (button.dataset.verb === "leave") dialog.showModal();
      else act(card, number, button.dataset.verb, { seconds: Number(button.dataset.seconds) || null });
    });
  }
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "leave") act(card, number, "leave", { finish: true });
    dialog.returnValue = "";
  });
  card.querySelector(".whole").href = place(`runs/${number}/page`);
  card.querySelector(".charts").append(...CHARTS.map(() => document.createElement("div")));
  document.getElementById("peers").append(card);
  return card;
}

async function act(card, number, verb, wanted) {
  const output = card.querySelector("output");
  const answer = await fetch(place(`peers/${number}/${verb}`), { method: "POST", body: JSON.stringify(wanted) })
    .then((response) => response.json())
    .catch(() => ({ error: "the page's server does not answer" }));
  output.className = answer.error ? "error" : "";
  write(output, answer.error ? [answer.error, answer.hint].filter(Boolean).join("; ") : "done");
}

function drawTiles(card, peer) {
  const status = peer.status;
  const figures = status.state ? {
    [status.program ? "loss" : "loss, nats"]: status.loss === null ? "-" : status.loss.toFixed(3),
    [`${status.unit} a second`]: Math.round(status.tokens_per_second).toLocaleString("en"),
    "meetings": status.meetings.completed.toLocaleString("en"),
    "blocked": status.train_seconds ? `${(100 * status.blocked_seconds / status.train_seconds).toFixed(1)} %` : "-",
    "partners in sight": String(status.peers_seen),
    ...(status.stage ? {
      "stage": status.stage,
      "starved": status.train_seconds + status.starved_seconds ? `${(100 * status.starved_seconds / (status.train_seconds + status.starved_seconds)).toFixed(1)} %` : "-",
    } : {}),
  } : {};
  replaceIfNew(card.querySelector(".tiles"), JSON.stringify(figures), () => Object.entries(figures).map(([name, value]) => {
    const tile = document.createElement("div");
    tile.append(element("dt", name), element("dd", value));
    return tile;
  }));
}

function drawTable(card, peer) {
  replaceIfNew(card.querySelector("table"), JSON.stringify(peer.partners), () => {
    if (!peer.partners.length) return [element("caption", "no partner yet")];
    const head = document.createElement("tr");
    head.append(...peer.partner_columns.map((name) => element("th", name, { scope: "col" })));
    return [head, ...peer.partners.map((cells) => {
      const row = document.createElement("tr");
      row.append(...cells.map((cell) => element("td", cell)));
      return row;
    })];
  });
}

function drawRows(card, peer) {
  replaceIfNew(card.querySelector(".rows"), JSON.stringify(peer.rows), () =>
    Object.entries(peer.rows).flatMap(([name, value]) => {
      const shown = element("dd", value);
      const whole = COPIED[name] ? COPIED[name](peer.status) : "";
      if (whole) shown.append(" ", copyButton(name, whole));
      return [element("dt", name), shown];
    }));
}

function copyButton(name, value) {
  const button = element("button", "Copy", { type: "button", className: "small", ariaLabel: `Copy the ${name}` });
  button.addEventListener("click", async () => {
    const copied = navigator.clipboard ? await navigator.clipboard.writeText(value).then(() => true, () => false) : false;
    button.textContent = copied ? "Copied" : "Select it and press Ctrl-C";
    if (!copied) getSelection().selectAllChildren(button.parentElement);
    setTimeout(() => { button.textContent = "Copy"; }, 3000);
  });
  return button;
}

function drawLimits(card, number, peer) {
  const form = card.querySelector(".settings");
  if (form.contains(document.activeElement) && document.activeElement.type !== "checkbox") return;
  replaceIfNew(form, JSON.stringify(peer.limits), () => peer.limits.map((limit) => {
    const row = document.createElement("div");
    const name = limit.key.replaceAll("_", " ");
    const id = `limit-${number}-${limit.key}`;
    const meaning = element("small", limit.meaning, { id: `${id}-meaning` });
    const set = (value) => act(card, number, "set", { key: limit.key, value });
    const input = element("input", "", limit.is_switch ? { type: "checkbox", checked: limit.value === "true" } : { value: limit.value });
    input.id = id;
    input.setAttribute("aria-describedby", meaning.id);
    const label = element("label", name, { htmlFor: id });
    if (limit.is_switch) {
      input.setAttribute("role", "switch");
      input.addEventListener("change", () => set(String(input.checked)));
      row.append(label, input, meaning);
    } else {
      const button = element("button", "Set", { type: "button", ariaLabel: `Set ${name}` });
      button.addEventListener("click", () => set(input.value || null));
      input.addEventListener("keydown", (event) => { if (event.key === "Enter") { event.preventDefault(); set(input.value || null); } });
      row.append(label, input, button, meaning);
    }
    return row;
  }));
}

function traces(chart, history) {
  const points = history.points;
  const minutes = points.ts.map((ts) => new Date(1000 * ts));
  return chart.lines.map(([name, key, hue, dash]) => {
    const x = key ? minutes : history.evals.ts.map((ts) => new Date(1000 * ts));
    const y = (key ? points[key] : history.evals.loss).map((value) => value === null ? null : value * (chart.scale || 1));
    const look = key ? { mode: "lines", line: { color: color(hue), width: 1.8, dash: dash || "solid" } } : { mode: "markers", marker: { color: color(hue), size: 6 } };
    return { x, y, name, hoverinfo: "x+y+name", ...look };
  });
}

function drawCharts(card, peer) {
  const history = peer.history;
  const places = card.querySelector(".charts");
  const there = Boolean(history.points && history.points.ts.length > 1);
  places.hidden = !there;
  if (!there) return;
  const key = `${history.points.ts.at(-1)} ${history.evals.loss.length} ${dark.matches}`;
  if (places.dataset.shown === key) return;
  places.dataset.shown = key;
  CHARTS.forEach((chart, index) => {
    const axis = { gridcolor: color("line"), linecolor: color("line"), zeroline: false, tickfont: { size: 11 }, fixedrange: true };
    const layout = {
      title: { text: chart.title(peer.status), font: { size: 13 }, x: 0, xref: "container", xanchor: "left", y: 0.97, yanchor: "top" },
      margin: { l: 46, r: 12, t: 40, b: 38 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: color("quiet"), family: getComputedStyle(document.body).fontFamily },
      xaxis: { ...axis, type: "date", nticks: 5 }, yaxis: { ...axis, nticks: 5, rangemode: index ? "tozero" : "normal" },
      showlegend: chart.lines.length > 1, legend: { orientation: "h", x: 1, xanchor: "right", y: 1.18, font: { size: 11 } },
      hovermode: "x", dragmode: false,
    };
    Plotly.react(places.children[index], traces(chart, history), layout, { displayModeBar: false, responsive: true });
  });
}

function draw(peer, number) {
  const card = cards.get(number) || cards.set(number, newCard(number)).get(number);
  const status = peer.status;
  const known = Boolean(status.state);
  const ended = ["left", "done", "failed"].includes(status.state);
  const state = peer.runs || ended ? status.state : "silent";
  const pill = card.querySelector(".state");
  pill.dataset.state = state;
  write(pill.querySelector(".sign"), SIGNS[state] || "?");
  write(pill.querySelector(".word"), state === "silent" ? "not running" : state || "not running");
  write(card.querySelector(".run-name"), known ? status.run_name : "");
  write(card.querySelector(".who"), known ? status.peer_id.slice(-6) : "no peer");
  card.querySelector(".whole").hidden = !known || !status.run_id;
  if (number === 0) document.title = known && status.run_name ? `${status.run_name} - Gossamer` : "Gossamer";
  write(card.querySelector(".home"), peer.home);
  write(card.querySelector(".sentence"), peer.runs || ended ? peer.sentence : known ? `${peer.words}; its last state: ${peer.sentence}` : peer.words);
  const warnings = known ? status.warnings : [];
  replaceIfNew(card.querySelector(".warnings"), JSON.stringify(warnings), () => warnings.map((words) => element("li", words)));
  const share = status.progress ? status.progress.share : known && status.total_steps ? status.step / status.total_steps : 0;
  const words = status.progress ? `${status.progress.work}: ${Math.round(100 * share)} %` : peer.rows.run || "";
  const bar = card.querySelector("progress");
  bar.value = Math.min(1, share);
  bar.ariaLabel = words || "progress";
  write(card.querySelector(".run"), words);
  card.querySelector(".buttons").hidden = !peer.runs;
  card.querySelector("[data-verb=resume]").hidden = !peer.may_resume;
  card.querySelector("[data-verb=leave]").hidden = state === "leaving";
  for (const button of card.querySelectorAll("[data-verb=pause]")) button.hidden = state === "paused";
  card.querySelector(".partners").hidden = !peer.runs;
  card.querySelector(".more").hidden = !known;
  card.querySelector(".limits").hidden = !peer.limits.length;
  drawTiles(card, peer);
  drawTable(card, peer);
  drawRows(card, peer);
  drawLimits(card, number, peer);
  drawCharts(card, peer);
}

function drawMachines(machines) {
  const section = document.getElementById("machines");
  section.hidden = false;
  write(section.querySelector(".sentence"), machines.together || "no peer trains");
  replaceIfNew(section.querySelector("ul"), JSON.stringify(machines.rows), () => machines.rows.map((row) => {
    const pill = element("span", "", { className: "state" });
    pill.dataset.state = row.shown_state || "silent";
    pill.append(element("span", SIGNS[row.shown_state] || "?", { className: "sign", ariaHidden: "true" }), ` ${row.shown_state === "silent" ? "no answer" : row.shown_state || "no peer"}`);
    const item = document.createElement("li");
    const whose = element("span", row.run ? `${row.run} ` : "", { className: "whose" });
    whose.append(element("span", row.peer_id.slice(-6), { className: "who" }));
    item.append(
      pill,
      element("b", row.machine),
      whose,
      element("span", row.figures, { className: "figures" }),
      element("p", row.sentence),
    );
    return item;
  }));
}

let newest = [];
function drawAll() {
  newest.forEach(draw);
}

function watch() {
  const source = new EventSource(place("live/peers"));
  source.addEventListener("machines", (message) => drawMachines(JSON.parse(message.data)));
  source.addEventListener("message", (message) => {
    heardAt = Date.now();
    newest = JSON.parse(message.data);
    drawAll();
  });
}

setInterval(() => {
  const connection = document.getElementById("connection");
  const lost = heardAt > 0 && Date.now() - heardAt > STALE_MS;
  connection.className = lost ? "lost" : "";
  write(connection, lost ? "the page's server is gone: start `peer dashboard` again" : heardAt ? "live" : "connecting");
}, 500);
dark.addEventListener("change", drawAll);
watch();
