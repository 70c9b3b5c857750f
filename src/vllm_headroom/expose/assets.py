"""The page's style, script and icons."""

import base64
import hashlib
from typing import Final
from urllib.parse import quote

from vllm_headroom.expose.drawing import STYLE, THEME_RULES, pack_style
from vllm_headroom.vocabulary import Level

_LEVEL_RULES: Final = "".join(
    f".hero.{level},li.{level},.alike.{level}{{border-color:var(--{level})}}"
    f".{level} b,.{level} h1,b.{level}{{color:var(--{level})}}"
    for level in Level
)
"""The rules that colour elements by their level."""

_HEAD_RULES: Final = pack_style("""
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem;color:var(--ink);
  background:var(--ground);overflow-wrap:anywhere}
h1{font-size:1.15rem;margin:0}
h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
p{margin:.3rem 0}
a{color:inherit}
.dim,figcaption{color:var(--dim)}
.hero{border-left:.5rem solid;padding:.2rem 1rem;margin:1rem 0}
.hero>b{display:flex;flex-wrap:wrap;align-items:baseline;column-gap:.8rem;
  font-size:clamp(1.7rem,7vw,2.6rem);line-height:1.2}
.hero>b small{font-size:1rem;line-height:1.4;font-weight:400;color:var(--dim)}
.hero p{font-size:1.1rem}
h1 small{font-weight:400;font-size:.95rem;color:var(--dim)}
.run small{display:block}
small{color:var(--dim)}
.verdicts{list-style:none;margin:1rem 0;padding:0}
li[class]{border-left:.35rem solid;padding:.2rem .8rem;margin:.4rem 0}
.verdicts li>b{font-size:.8rem;letter-spacing:.05em}
summary{cursor:pointer}
.alike{border-left:.35rem solid;padding:.2rem .8rem;margin:.4rem 0}
""")
_BODY_RULES: Final = pack_style("""
figure{margin:1rem 0;position:relative}
nav [aria-current]{font-weight:700;text-decoration:none;color:var(--ink)}
figure>i{position:absolute;right:0;font:.85rem system-ui,sans-serif;color:var(--dim)}
svg{display:block;width:100%;height:11rem;border-top:1px solid var(--line)}
.strip svg{height:2.5rem}
.rooms svg{height:4rem}
.axis{display:flex;gap:.5rem;justify-content:space-between;color:var(--dim);font-size:.85rem}
.plot{display:grid;grid-template-columns:4.2rem 1fr;margin-top:.5rem}
.values{display:flex;flex-direction:column;justify-content:space-between;text-align:right;
  font-size:.75rem;line-height:1;margin:-.4rem .5rem -.4rem 0;color:var(--dim)}
.rooms .values span:nth-child(2n){display:none}
.rooms .ticks text:nth-child(2n){display:none}
.plot .ticks{grid-column:2;height:1.2rem;border:0;overflow:visible}
.reading{position:relative;min-width:0}
.reading output{position:absolute;top:.2rem;padding:.1rem .4rem;font-size:.85rem;
  background:var(--ground);border:1px solid var(--line);pointer-events:none}
.key{font-size:.85rem;color:var(--dim)}
.key span{margin-right:1rem;display:inline-block}
.key i{display:inline-block;width:1.2rem;margin-right:.3rem;border-top:.2rem solid var(--room);
  vertical-align:middle}
.key .low{border-top:1px solid var(--peak)}
.key .end{border-top:3px solid var(--alarm)}
.key .to{border-top:.15rem dashed var(--alarm)}
.key .area{height:.7rem;border:0;background:var(--alarm);opacity:.25}
.key .at{width:0;height:.9rem;border:0;border-left:2px dashed var(--alarm)}
.key .now{width:0;height:.9rem;border:0;border-left:2px solid var(--ink)}
code{font-size:.9em;background:color-mix(in srgb,var(--line) 35%,transparent);padding:.1rem .3rem;
  border-radius:.2rem}
button{font:inherit;font-size:.85rem;color:inherit;background:none;border:1px solid var(--line);
  border-radius:.3rem;padding:.05rem .5rem;cursor:pointer}
.more{margin-top:1rem}
summary h2{display:inline;margin:0}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);
  white-space:nowrap}
.words td:last-child,tbody th{white-space:normal}
.words td:last-child{min-width:16rem}
.figures td,.figures th~th{text-align:right;font-variant-numeric:tabular-nums}
.rooms{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(17rem,100%),1fr));
  column-gap:1.5rem}
.rooms figure{margin:.5rem 0}
.rooms figure>i,.rooms .ahead span:not(:last-child){display:none}
.notice{border:1px solid var(--warning);padding:.4rem .8rem}
@media(max-width:36rem){
  thead{display:none}
  tr,th,td{display:block;border:0}
  tr{border-bottom:1px solid var(--line);padding:.3rem 0}
  td,.figures td{text-align:left;white-space:normal}
  td::before{content:attr(data-t) ": ";color:var(--dim)}
}
@media print{
  body{max-width:none}
  svg{break-inside:avoid}
}
""")
PAGE_STYLE: Final = f"{STYLE}{THEME_RULES}{_HEAD_RULES}{_LEVEL_RULES}{_BODY_RULES}"
"""The page's entire style. If two rules have the same specificity, the later one applies."""

SCRIPT: Final = """\
(() => {
  const root = document.documentElement;
  const pad = (number) => String(number).padStart(2, "0");
  const clock = (date) => `${pad(date.getHours())}:${pad(date.getMinutes())}`;
  const day = (date) => `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;
  const localize = (page) => {
    for (const time of page.querySelectorAll("time")) {
      const date = new Date(time.dateTime);
      time.title = time.textContent;
      time.textContent = `${day(date)} ${clock(date)}:${pad(date.getSeconds())}`;
    }
    for (const tick of page.querySelectorAll("[data-time]")) {
      const date = new Date(1000 * tick.dataset.time);
      const shown = clock(date);
      const isDay = shown === "00:00" || "day" in tick.dataset;
      const name = {day: "numeric", month: "short"};
      tick.textContent = isDay ? date.toLocaleDateString([], name) : shown;
    }
    const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
    for (const note of page.querySelectorAll(".zone")) {
      if (zone !== "UTC") note.textContent = `Times are in ${zone}; the pointer shows UTC.`;
    }
    if (navigator.clipboard) {
      for (const button of page.querySelectorAll(".copy")) button.hidden = false;
    }
  };

  const nearest = (plot, x) => {
    for (const path of plot.querySelectorAll(".line,.ahead")) {
      for (const part of path.getAttribute("d").split("M")) {
        const points = [...part.matchAll(/([\\d.]+) ([\\d.]+)/g)].map((m) => [+m[1], +m[2]]);
        const place = points.findIndex((point) => point[0] >= x);
        if (place < 0 || (place === 0 && points[0][0] > x + 1)) continue;
        const [endX, endY] = points[place];
        const [startX, startY] = points[Math.max(0, place - 1)];
        const share = endX > startX ? (x - startX) / (endX - startX) : 1;
        return startY + share * (endY - startY);
      }
    }
    return null;
  };
  const show = (plot, share) => {
    const svg = plot.querySelector("svg");
    const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
    const {begin, end, top, unit} = plot.dataset;
    const x = width * share;
    const y = nearest(plot, x);
    const value = y === null ? null : top * (1 - y / height);
    let text = "not known";
    if (value !== null) text = unit ? `${(value / 2 ** 30).toFixed(2)} GiB` : value.toFixed(0);
    const date = new Date(1000 * (Number(begin) + share * (end - begin)));
    let cross = svg.querySelector(".cross");
    if (!cross) {
      cross = svg.appendChild(document.createElementNS(svg.namespaceURI, "line"));
      cross.setAttribute("class", "cross");
      cross.setAttribute("y2", height);
    }
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
    const box = plot.querySelector("output") ?? plot.appendChild(document.createElement("output"));
    box.textContent = `${day(date)} ${clock(date)}: ${text}`;
    box.style.left = share < 0.5 ? `${100 * share + 1}%` : "";
    box.style.right = share < 0.5 ? "" : `${100 * (1 - share) + 1}%`;
    plot.dataset.share = share;
  };
  const clear = (plot) => {
    plot.querySelector(".cross")?.remove();
    plot.querySelector("output")?.remove();
  };
  document.addEventListener("pointermove", (event) => {
    const plot = event.target.closest?.(".reading");
    document.querySelectorAll(".reading").forEach((other) => other === plot || clear(other));
    if (!plot) return;
    const box = plot.getBoundingClientRect();
    show(plot, Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  });
  document.addEventListener("keydown", (event) => {
    const plot = event.target.closest?.(".reading");
    const step = {ArrowLeft: -0.01, ArrowRight: 0.01}[event.key];
    if (!plot || !step) return;
    event.preventDefault();
    const share = Number(plot.dataset.share ?? (step < 0 ? 1 : 0));
    show(plot, Math.min(1, Math.max(0, share + step)));
  });
  document.addEventListener("click", async (event) => {
    if (event.target.id === "theme") {
      const isDark = getComputedStyle(root).getPropertyValue("--ground").trim() === "#0d1117";
      root.dataset.theme = isDark ? "light" : "dark";
      localStorage.setItem("theme", root.dataset.theme);
    }
    if (event.target.matches(".copy")) {
      await navigator.clipboard.writeText(event.target.previousElementSibling.textContent);
      event.target.textContent = "Copied";
    }
  });
  try {
    const theme = localStorage.getItem("theme");
    if (theme) root.dataset.theme = theme;
    document.getElementById("theme").hidden = false;
  } catch {
    // A browser that stores nothing follows the system's theme.
  }

  const focusable = () => [...document.querySelectorAll("a,summary,button,[tabindex]")];
  const replace = (old, fresh) => {
    const opened = (part) => [part, ...part.querySelectorAll("details")];
    const wasOpen = opened(old).map((details) => details.open);
    opened(fresh).forEach((details, place) => {
      if (details.tagName === "DETAILS") details.open = wasOpen[place] ?? details.open;
    });
    old.replaceWith(fresh);
  };
  const isSame = (old, fresh) => {
    if (old.querySelector("output")) return true;
    if (old.tagName === "DETAILS" && old.innerHTML === fresh.innerHTML) return true;
    return old.outerHTML === fresh.outerHTML;
  };
  const update = async () => {
    if (document.hidden || getSelection().type === "Range") return;
    const age = document.getElementById("age");
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      localize(next);
      const focused = focusable().indexOf(document.activeElement);
      for (const part of ["header", "main"]) {
        const old = [...document.querySelector(part).children];
        const fresh = [...next.querySelector(part).children];
        if (old.length === fresh.length) {
          old.forEach((child, place) => {
            if (!isSame(child, fresh[place])) replace(child, fresh[place]);
          });
        } else {
          replace(document.querySelector(part), next.querySelector(part));
        }
      }
      document.title = next.title;
      document.querySelector("link[rel=icon]").href = next.querySelector("link[rel=icon]").href;
      if (focused >= 0) focusable()[focused]?.focus({preventScroll: true});
    } catch {
      const since = age.dataset.seen;
      age.textContent = `No answer from the sidecar since ${since}: what follows is old.`;
    }
  };
  localize(document);
  setInterval(update, 1000 * document.body.dataset.seconds);
})();
"""
"""The script has the following tasks:

- It shows times in the reader's time zone.
- It shows the value at the pointer, or at a point chosen by arrow keys.
- It copies commands.
- It switches the theme.
- It regularly reloads the page to replace changed elements. The scroll position, focus, selection,
  opened lines and the value under the pointer are preserved.
"""


def _hash(text: str) -> str:
    """Return a text's hash in the notation of a Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_hash(PAGE_STYLE)}'; "
    f"script-src 'sha256-{_hash(SCRIPT)}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy. The policy allows only this style and this script. The policy
also prevents the page from being shown in a frame.
"""

_ICONS: Final = {
    Level.GOOD: ("#1a7f37", "<path d='M4 9l3 3 6-7' fill='none' stroke='#fff' stroke-width='2'/>"),
    Level.UNKNOWN: ("#57606a", "<path d='M5 8h6' stroke='#fff' stroke-width='2'/>"),
    Level.WARNING: ("#8a5a00", "<path d='M8 3v6M8 11v2' stroke='#fff' stroke-width='2'/>"),
    Level.ALARM: ("#b42318", "<path d='M4 4l8 8M12 4l-8 8' stroke='#fff' stroke-width='2'/>"),
}
"""The colour and shape of each level's icon. The shape is for people who cannot see the colour."""


def build_icon(level: Level) -> str:
    """Return the data URL of the level's icon."""
    colour, shape = _ICONS[level]
    picture = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
        f"<circle cx='8' cy='8' r='8' fill='{colour}'/>{shape}</svg>"
    )
    return f"data:image/svg+xml,{quote(picture, safe='')}"
