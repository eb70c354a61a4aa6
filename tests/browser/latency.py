"""Scripts that watch a lab from inside the page, where no change is lost and the clock is the browser's own.

Each is a JavaScript function for Playwright's ``evaluate`` or ``evaluate_handle`` on the element around a lab.
"""

from __future__ import annotations

from dataclasses import dataclass

from playwright.sync_api import JSHandle

#: Every change of what is shown: widgets replace the insides of an element, or set an attribute.
_EVERYTHING = "{subtree: true, childList: true, characterData: true, attributes: true}"

#: (root, {start, seconds}) -> {found} or {failure}: a sentence that starts like this, also if it is there only briefly.
SENTENCE = f"""
(root, {{start, seconds}}) => new Promise(resolve => {{
    const all = () => [...root.querySelectorAll("p[role=status], p[role=alert]")].map(p => p.textContent.trim());
    const before = new Set(all());
    const observer = new MutationObserver(look);
    const timer = setTimeout(() => end({{failure: "the time is over"}}), 1000 * seconds);
    function end(result) {{
        observer.disconnect();
        clearTimeout(timer);
        resolve({{...result, all: all()}});
    }}
    function look() {{
        const now = all();
        const found = now.find(text => text.startsWith(start));
        if (found !== undefined) end({{found}});
        else if (now.some(text => text.startsWith("Failed: ") && !before.has(text))) end({{failure: "the lab failed"}});
    }}
    observer.observe(root, {_EVERYTHING});
    look();
}})
"""

#: (root, alt) -> watcher: notes every new picture whose alternative text contains ``alt``.
FRAMES = f"""
(root, alt) => {{
    const frames = [];
    const look = () => {{
        const picture = [...root.querySelectorAll("img")].find(one => one.alt.includes(alt));
        if (picture && picture.src !== frames.at(-1)?.src)
            frames.push({{milliseconds: performance.now(), src: picture.src, alt: picture.alt}});
    }};
    const observer = new MutationObserver(look);
    observer.observe(root, {_EVERYTHING});
    look();
    return {{frames, stop: () => observer.disconnect()}};
}}
"""

#: (root, {key, expected, seconds}) -> {done}: from the key to each decoded picture, in milliseconds.
#: ``expected`` maps a part of the alternative text that names a picture to a part that it has after the key only.
LATENCY = f"""
(root, {{key, expected, seconds}}) => {{
    const find = ([name, text]) =>
        [...root.querySelectorAll("img")].find(one => one.alt.includes(name) && one.alt.includes(text));
    const early = Object.entries(expected).filter(find).map(one => one.join(" with "));
    if (early.length) return {{done: Promise.resolve({{failure: `shown before the key: ${{early}}`}})}};
    let pressed = null;
    const press = event => {{ if (event.key === key && pressed === null) pressed = performance.now(); }};
    addEventListener("keydown", press, true);
    const done = new Promise(resolve => {{
        const milliseconds = {{}}, decoding = new Set();
        const observer = new MutationObserver(look);
        const timer = setTimeout(() => {{
            const missing = Object.keys(expected).filter(name => !(name in milliseconds));
            end({{failure: pressed === null ? `no ${{key}} has reached the page` : `not shown in time: ${{missing}}`}});
        }}, 1000 * seconds);
        function end(result) {{
            observer.disconnect();
            clearTimeout(timer);
            removeEventListener("keydown", press, true);
            resolve(result);
        }}
        function look() {{
            for (const [name, text] of Object.entries(expected)) {{
                const picture = find([name, text]);
                if (picture === undefined || pressed === null || name in milliseconds || decoding.has(name)) continue;
                decoding.add(name);
                const shown = () => {{
                    decoding.delete(name);
                    if (!picture.isConnected) return look();  // replaced meanwhile
                    milliseconds[name] = performance.now() - pressed;
                    if (Object.keys(expected).every(one => one in milliseconds)) end({{milliseconds}});
                }};
                const broken = () => {{
                    decoding.delete(name);
                    if (!picture.isConnected) return look();
                    end({{failure: `no picture that can be decoded: ${{picture.alt}}`}});
                }};
                picture.decode().then(shown, broken);
            }}
        }}
        observer.observe(root, {_EVERYTHING});
    }});
    return {{done}};
}}
"""

#: (root) -> what has the focus, in words; null when that is not in the lab.
FOCUSED = """
root => {
    const element = document.activeElement;
    if (!root.contains(element)) return null;
    const label = element.closest(".widget-slider")?.querySelector(".widget-label").innerText.trim();
    if (element.matches(".noUi-handle")) return label;
    if (element.matches(".widget-readout")) return `${label}, as a number`;
    return element.innerText.trim() || element.tagName.toLowerCase();
}
"""


@dataclass(frozen=True)
class Frame:
    """A picture as it was at one time of the page's clock."""

    milliseconds: float
    src: str
    alt: str


@dataclass(frozen=True)
class FrameWatch:
    """Notes the frames of one picture until it is stopped."""

    watcher: JSHandle

    @property
    def frames(self) -> list[Frame]:
        """All frames so far; the first is what was shown when watching began."""
        return [Frame(**frame) for frame in self.watcher.evaluate("watcher => watcher.frames")]

    def stop(self) -> list[Frame]:
        self.watcher.evaluate("watcher => watcher.stop()")
        return self.frames
