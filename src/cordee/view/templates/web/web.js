// Keeps a page current: parts of it come as server-sent events, money ticks, and keys go to pages.
(() => {
  "use strict";
  const typed = new Map(); // what stands in each filter, which outlives the part around it

  function span(us) {
    const s = Math.max(0, Math.floor(us / 1e6));
    if (s < 60) return `${s}s`;
    if (s < 3600) return `${Math.floor(s / 60)}m`;
    if (s < 4 * 86400) return `${Math.floor(s / 3600)}h${Math.floor((s % 3600) / 60)}m`;
    return `${Math.floor(s / 86400)}d${Math.floor((s % 86400) / 3600)}h`;
  }

  function money(microUsd) {
    const usd = microUsd / 1e6;
    const digits = usd >= 10000 ? 2 : usd >= 0.1 ? 3 : 5;
    return `$${usd.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits })}`;
  }

  const pulse = document.getElementById("pulse");
  function tick() {
    if (pulse?.classList.contains("off")) return; // nobody says that it still holds
    const now = Date.now() * 1000 + skewUs;
    for (const at of document.querySelectorAll("[data-since]")) at.textContent = span(now - Number(at.dataset.since));
    for (const at of document.querySelectorAll("[data-rate]")) {
      const rate = Number(at.dataset.rate);
      if (rate) at.textContent = money(Number(at.dataset.money) + (rate * (now - Number(at.dataset.atUs))) / 3.6e9);
    }
  }

  // Times are the server's: the page says when it was drawn, and how far this clock is off follows from that.
  const first = document.querySelector("[data-at-us]");
  let skewUs = first ? Number(first.dataset.atUs) - Date.now() * 1000 : 0;

  function filter(input) {
    const wanted = input.value.toLowerCase();
    typed.set(input.dataset.filter, input.value);
    const rows = document.getElementById(input.dataset.filter);
    for (const row of rows ? rows.children : []) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  }

  function localTimes(within) {
    for (const at of within.querySelectorAll("time[data-at]")) {
      const time = new Date(Number(at.dataset.at) / 1000);
      at.title = `${at.textContent} UTC`;
      at.textContent = time.toLocaleString("sv-SE").slice(0, 16);
    }
  }

  // A part is replaced as a whole, unless somebody is in it: then only what is not at hand changes, once that is left.
  const waiting = new Map();
  function put(id, html) {
    const part = document.getElementById(id);
    if (!part) return;
    const inside = part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button");
    const selected = getSelection();
    if (inside && !document.activeElement.matches("[data-filter]")) return void waiting.set(id, html);
    if (selected && !selected.isCollapsed && part.contains(selected.anchorNode)) return void waiting.set(id, html);
    waiting.delete(id);
    const focused = inside ? document.activeElement.dataset.filter : null;
    const link = !inside && part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    const open = [...part.querySelectorAll("details[open]")].map((each) => each.id);
    const scrolled = [...part.querySelectorAll(".wide, pre.log")].map((each) => [each.scrollLeft, each.scrollTop, each.scrollTop + each.clientHeight >= each.scrollHeight - 4]);
    part.innerHTML = html;
    for (const id of open) if (id && document.getElementById(id)) document.getElementById(id).open = true;
    [...part.querySelectorAll(".wide, pre.log")].forEach((each, at) => {
      if (!scrolled[at]) return;
      each.scrollLeft = scrolled[at][0];
      each.scrollTop = scrolled[at][2] ? each.scrollHeight : scrolled[at][1];
    });
    for (const input of part.querySelectorAll("[data-filter]")) {
      input.value = typed.get(input.dataset.filter) || "";
      if (input.value) filter(input);
      if (input.dataset.filter === focused) input.focus();
    }
    if (link) [...part.querySelectorAll("a")].find((each) => each.getAttribute("href") === link)?.focus();
    localTimes(part);
    tick();
  }

  // Only a page that is seen is followed: a browser opens six connections to a server, and all its pages divide them.
  let source = null;
  function leave() {
    source?.close();
    source = null;
    pulse.classList.add("off");
    pulse.textContent = "paused";
  }

  function follow() {
    if (document.hidden) return leave();
    if (source && source.readyState !== EventSource.CLOSED) return;
    source = new EventSource(document.body.dataset.live);
    source.addEventListener("parts", (event) => {
      const { at_us: atUs, parts } = JSON.parse(event.data);
      skewUs = atUs - Date.now() * 1000;
      for (const [id, html] of Object.entries(parts)) put(id, html);
      document.body.dataset.updates = String(Number(document.body.dataset.updates || 0) + 1);
    });
    source.onopen = () => { pulse.textContent = "live"; pulse.classList.remove("off"); };
    source.onerror = () => {
      pulse.classList.add("off");
      pulse.textContent = source?.readyState === EventSource.CLOSED ? "ended: reload the page" : "connecting again";
    };
  }

  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-filter]")) filter(event.target);
  });
  document.addEventListener("focusout", () => setTimeout(() => { for (const [id, html] of [...waiting]) put(id, html); }));

  let leader = 0; // when g was pressed
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const writes = event.target.matches("input, select, textarea");
    if (event.key === "Escape" && writes) event.target.blur();
    if (writes) return;
    if (event.key === "/") {
      const field = document.querySelector("[type=search]");
      if (field) { field.focus(); event.preventDefault(); }
    } else if (event.key === "g") {
      leader = Date.now();
    } else if (Date.now() - leader < 1500) {
      leader = 0;
      document.querySelector(`nav a[data-key="${CSS.escape(event.key)}"]`)?.click();
    }
  });

  localTimes(document);
  for (const log of document.querySelectorAll("pre.log")) log.scrollTop = log.scrollHeight;
  tick();
  setInterval(tick, matchMedia("(prefers-reduced-motion: reduce)").matches ? 10000 : 200);
  if (document.body.dataset.live) {
    follow();
    document.addEventListener("visibilitychange", follow);
    addEventListener("pagehide", leave);
    addEventListener("pageshow", follow);
  }
})();
