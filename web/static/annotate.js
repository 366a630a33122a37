import { h, render } from "/vendor/preact.mjs";
import htm from "/vendor/htm.mjs";

const html = htm.bind(h);
render(html`<p>…</p>`, document.getElementById("annotate"));
