"""The style, the script and the icons that the page carries."""

import base64
import hashlib
from typing import Final
from urllib.parse import quote

from vllm_headroom.expose.drawing import STYLE, pack_style
from vllm_headroom.vocabulary import Level

_LEVEL_RULES: Final = "".join(
    f".hero.{level},li.{level}{{border-color:var(--{level})}}"
    f".{level} b,.{level} h1,b.{level}{{color:var(--{level})}}"
    for level in Level
)
"""The rules that give everything of a level the level's colour."""

_HEAD_RULES: Final = pack_style("""
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem;color:var(--ink);
  background:var(--ground);overflow-wrap:anywhere}
h1{font-size:1.15rem;margin:0}
h2{font-size:1.05rem;margin:1.6rem 0 .3rem}
p{margin:.3rem 0}
a{color:inherit}
.dim,figcaption{color:var(--dim)}
.hero{border-left:.5rem solid;padding:.2rem 1rem;margin:1rem 0}
.hero>b{display:block;font-size:2.6rem;line-height:1.2}
.hero>b small{display:inline-block;font-size:1rem;line-height:1.4;font-weight:400;color:var(--dim)}
.hero p{font-size:1.1rem}
.verdicts{list-style:none;margin:1rem 0;padding:0}
li[class]{border-left:.35rem solid;padding:.2rem .8rem;margin:.4rem 0}
.verdicts li>b{font-size:.8rem;letter-spacing:.05em}
summary{cursor:pointer}
""")
_BODY_RULES: Final = pack_style("""
figure{margin:1rem 0;position:relative}
figure>i{position:absolute;right:0;font:.85rem system-ui,sans-serif;color:var(--dim)}
svg{display:block;width:100%;height:11rem;border-top:1px solid var(--line)}
.strip svg{height:2.5rem}
.rooms svg{height:4rem}
.axis{display:flex;gap:.5rem;justify-content:space-between;color:var(--dim);font-size:.85rem}
.axis.ahead span{flex:1;text-align:right}
.axis.ahead span:first-child{text-align:left}
.key{font-size:.85rem;color:var(--dim)}
.key span{margin-right:1rem;display:inline-block}
.key i{display:inline-block;width:1.2rem;margin-right:.3rem;border-top:.2rem solid var(--room);
  vertical-align:middle}
.key .low{border-top:1px solid var(--peak)}
.key .to{border-top:.15rem dashed var(--alarm)}
.key .at{width:0;height:.9rem;border:0;border-left:2px dashed var(--dim)}
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
PAGE_STYLE: Final = f"{STYLE}{_HEAD_RULES}{_LEVEL_RULES}{_BODY_RULES}"
"""The whole style of the page; of two rules of the same weight the later one counts."""

SCRIPT: Final = """\
(() => {
  const focusable = () => [...document.querySelectorAll("a,summary,[tabindex]")];
  const replace = (old, fresh) => {
    const wasOpen = [...old.querySelectorAll("details")].map((details) => details.open);
    fresh.querySelectorAll("details").forEach((details, place) => {
      details.open = wasOpen[place] ?? details.open;
    });
    old.replaceWith(fresh);
  };
  const update = async () => {
    if (document.hidden || getSelection().type === "Range") return;
    const age = document.getElementById("age");
    try {
      const answer = await fetch(location.href, {cache: "no-store"});
      if (!answer.ok) throw new Error(answer.status);
      const next = new DOMParser().parseFromString(await answer.text(), "text/html");
      const focused = focusable().indexOf(document.activeElement);
      for (const part of ["header", "main"]) {
        const old = [...document.querySelector(part).children];
        const fresh = [...next.querySelector(part).children];
        if (old.length === fresh.length) {
          old.forEach((child, place) => {
            if (child.outerHTML !== fresh[place].outerHTML) replace(child, fresh[place]);
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
  setInterval(update, 1000 * document.body.dataset.seconds);
})();
"""
"""Loads the page again and again, and replaces the elements that have changed. The scroll position,
the focus, a selection and opened lines stay."""


def _hash(text: str) -> str:
    """Return a text's hash as a Content-Security-Policy names it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_hash(PAGE_STYLE)}'; "
    f"script-src 'sha256-{_hash(SCRIPT)}'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page's Content-Security-Policy: it permits this style and this script and nothing else, and
forbids showing the page in a frame."""

_ICONS: Final = {
    Level.GOOD: ("#1a7f37", "<path d='M4 9l3 3 6-7' fill='none' stroke='#fff' stroke-width='2'/>"),
    Level.UNKNOWN: ("#57606a", "<path d='M5 8h6' stroke='#fff' stroke-width='2'/>"),
    Level.WARNING: ("#8a5a00", "<path d='M8 3v6M8 11v2' stroke='#fff' stroke-width='2'/>"),
    Level.ALARM: ("#b42318", "<path d='M4 4l8 8M12 4l-8 8' stroke='#fff' stroke-width='2'/>"),
}
"""The colour of each level's icon, and its shape, for people who do not see the colour."""


def build_icon(level: Level) -> str:
    """Return the data URL of the level's icon."""
    colour, shape = _ICONS[level]
    picture = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
        f"<circle cx='8' cy='8' r='8' fill='{colour}'/>{shape}</svg>"
    )
    return f"data:image/svg+xml,{quote(picture, safe='')}"
