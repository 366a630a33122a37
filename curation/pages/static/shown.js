// Rendering of people's texts: plain, Markdown, or chat turns. The result is nodes, never HTML.
import { html } from "/static/page.js";

const FENCE = /^\s*(```|~~~)/, BULLET = /^\s*([-*+]|\d{1,9}[.)])\s+/, HEADING = /^#{1,6}\s+/, QUOTE = /^>\s?/, ROW = /^\s*\|/;
const RULED = /^[\s|:-]+$/; // the second line of a table
const ROLES = "system|developer|user|human|assistant|gpt|ai|bot|model|tool|function";
const TURN = new RegExp(`^(?:\\*\\*|<\\|)?(${ROLES})(?:\\*\\*|\\|>)?\\s*:(?:\\*\\*)?[ \\t]*`, "i");
// Each alternative ends at the next of its own delimiters, so that matching takes linear time.
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|__([^_\n]+)__|(?<![\w*])\*([^*\n]+)\*(?!\w)|(?<![\w_])_([^_\n]+)_(?!\w)|!?\[([^[\]\n]+)\]\(((?:[^()\s]|\([^()\s]*\))+)\)/g;

// Replaces control characters, and characters that change a line's direction, by their code points.
export const visible = (text) => text.replace(/\r\n/g, "\n")
  .replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029\u202a-\u202e\u2066-\u2069]/g, (one) => `⟨U+${one.charCodeAt().toString(16).toUpperCase().padStart(4, "0")}⟩`);

// Isolates a text within a sentence of the page, so that its direction does not affect the sentence.
export const isolated = (text) => `\u2068${visible(text)}\u2069`;

// Renders inline Markdown. A link becomes its text and its address, and cannot be clicked.
function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, strong, strong2, emphasis, emphasis2, label, address] = found;
    parts.push(text.slice(end, found.index));
    if (code) parts.push(html`<code>${code}</code>`);
    else if (strong ?? strong2) parts.push(html`<strong>${inline(strong ?? strong2)}</strong>`);
    else if (emphasis ?? emphasis2) parts.push(html`<em>${inline(emphasis ?? emphasis2)}</em>`);
    else parts.push(html`${inline(label)} <code class="address" dir="ltr">${address}</code>`);
    end = found.index + whole.length;
  }
  return [...parts, text.slice(end)];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|");
const items = (block) => block.map((line) => html`<li dir="auto">${inline(line.replace(BULLET, ""))}</li>`);

const BLOCKS = {
  code: (block) => html`<pre dir="auto"><code>${block.join("\n")}</code></pre>`,
  heading: (block) => html`<p class="heading" dir="auto">${inline(block.join(" ").replace(HEADING, ""))}</p>`,
  list: (block) => (/^\s*\d/.test(block[0]) ? html`<ol start=${parseInt(block[0], 10)}>${items(block)}</ol>` : html`<ul>${items(block)}</ul>`),
  quote: (block) => html`<blockquote dir="auto">${inline(block.map((line) => line.replace(QUOTE, "")).join("\n"))}</blockquote>`,
  table: (block) => html`<table>${block.filter((line, place) => place !== 1 || !RULED.test(line)).map((line) => html`<tr>${cells(line).map((cell) => html`<td dir="auto">${inline(cell.trim())}</td>`)}</tr>`)}</table>`,
  text: (block) => html`<p dir="auto">${inline(block.join("\n"))}</p>`,
};

const kindOf = (line) => (HEADING.test(line) ? "heading" : BULLET.test(line) ? "list" : QUOTE.test(line) ? "quote" : ROW.test(line) ? "table" : "text");

function markdown(text) {
  const blocks = [];
  let kind = "";
  for (const line of text.split("\n")) {
    if (kind === "code") {
      if (FENCE.test(line)) kind = "";
      else blocks.at(-1)[1].push(line);
    } else if (FENCE.test(line)) blocks.push([kind = "code", []]);
    else if (!line.trim()) kind = "";
    else if (kind === kindOf(line) && kind !== "heading") blocks.at(-1)[1].push(line);
    else blocks.push([kind = kindOf(line), [line]]);
  }
  return blocks.map(([name, block]) => BLOCKS[name](block));
}

const isText = (value) => typeof value === "string";

// Returns turns of a chat in JSON, or undefined if the text is no such chat.
function messagesOf(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  let rows;
  try {
    rows = JSON.parse(text);
  } catch {
    return undefined;
  }
  rows = rows.messages ?? rows.conversations ?? rows;
  if (!Array.isArray(rows)) return undefined;
  const turns = rows.map((row) => {
    const said = row?.content ?? row?.value ?? row?.text;
    return [row?.role ?? row?.from, Array.isArray(said) ? said.map((part) => part?.text ?? `[${part?.type}]`).join("\n") : said];
  });
  return turns.length && turns.every((turn) => turn.every(isText)) ? turns : undefined;
}

// Returns turns as [role, text], from JSON messages or from lines that begin with a role and a colon.
function turnsOf(text) {
  const turns = messagesOf(text) ?? [];
  for (const line of turns.length ? [] : text.split("\n")) {
    const found = TURN.exec(line);
    if (found) turns.push([found[1], line.slice(found[0].length)]);
    else if (turns.length) turns.at(-1)[1] += `\n${line}`;
    else turns.push(["", line]);
  }
  return turns;
}

const Turn = ({ role, text }) => html`<div class="turn" data-role=${role.toLowerCase()}>${role && html`<b class="role" dir="auto">${visible(role)}</b>`}${markdown(visible(text))}</div>`;

// `display` is the text format of the project.
export function Shown({ text, display, isSmall }) {
  const size = isSmall ? "text small" : "text";
  if (display === "markdown") return html`<div class=${`${size} formatted`}>${markdown(visible(text))}</div>`;
  if (display === "chat") return html`<div class=${`${size} formatted`}>${turnsOf(text).map(([role, said]) => html`<${Turn} role=${role} text=${said} />`)}</div>`;
  return html`<p class=${size} dir="auto">${visible(text)}</p>`;
}
