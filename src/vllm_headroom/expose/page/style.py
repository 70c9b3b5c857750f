"""How the page looks, in the light, in the dark, on a phone and on paper."""

from __future__ import annotations

import base64
import hashlib
from typing import Final
from urllib.parse import quote

from vllm_headroom.expose.drawing import STYLE
from vllm_headroom.vocabulary import Level

_LEVELS: Final = "".join(
    f".verdicts .{level}{{border-color:var(--{level})}}.{level} b,b.{level}{{color:var(--{level})}}" for level in Level
)
PAGE_STYLE: Final = (
    f"{STYLE}"
    "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:0 auto;padding:1rem;color:var(--ink);"
    "background:var(--ground);overflow-wrap:break-word}h1{font-size:1.1rem;margin:0}"
    "h2{font-size:1.05rem;margin:1.6rem 0 .3rem}p{margin:.3rem 0}a{color:inherit}.dim,figcaption{color:var(--dim)}"
    ".verdicts{list-style:none;margin:1rem 0;padding:0}.verdicts>li{border-left:.35rem solid;padding:.35rem .8rem;"
    "margin:.4rem 0;font-size:1.1rem}.verdicts b{font-size:.8rem;letter-spacing:.05em}"
    f"{_LEVELS}figure{{margin:1rem 0;position:relative}}"
    "figure i{position:absolute;right:0;font:.85rem system-ui,sans-serif;color:var(--dim)}"
    "svg{display:block;width:100%;height:11rem;border-top:1px solid var(--line)}"
    ".strip svg{height:2.5rem}.axis{display:flex;gap:.5rem;justify-content:space-between;color:var(--dim);"
    "font-size:.85rem}.axis.ahead span{flex:1;text-align:right}.axis.ahead span:first-child{text-align:left}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.3rem .6rem .3rem 0;border-bottom:1px solid var(--line);white-space:nowrap}"
    ".words td:last-child,tbody th{white-space:normal}.words td:last-child{min-width:16rem}"
    ".figures td,.figures th~th{text-align:right;font-variant-numeric:tabular-nums}"
    ".rooms{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));column-gap:1.5rem}"
    ".notice{border:1px solid var(--warning);padding:.4rem .8rem}"
    "@media print{body{max-width:none}svg{break-inside:avoid}}"
)
_HASH: Final = base64.b64encode(hashlib.sha256(PAGE_STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; img-src data:; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
_SHAPES: Final = {
    Level.GOOD: ("#1a7f37", "<path d='M4 9l3 3 6-7' fill='none' stroke='#fff' stroke-width='2'/>"),
    Level.UNKNOWN: ("#57606a", "<path d='M5 8h6' stroke='#fff' stroke-width='2'/>"),
    Level.WARNING: ("#8a5a00", "<path d='M8 3v6M8 11v2' stroke='#fff' stroke-width='2'/>"),
    Level.ALARM: ("#b42318", "<path d='M4 4l8 8M12 4l-8 8' stroke='#fff' stroke-width='2'/>"),
}


def icon(level: Level) -> str:
    """Return the address of a picture of the level, told apart by its shape as well."""
    colour, shape = _SHAPES[level]
    picture = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'><circle cx='8' cy='8' r='8' fill='{colour}'/>"
        f"{shape}</svg>"
    )
    return f"data:image/svg+xml,{quote(picture, safe='')}"
