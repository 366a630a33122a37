// Differing words of two texts. Each text is returned as parts [text, whether the other text lacks it].

const CELLS_MAX = 4_000_000;
const words = (text) => text.match(/^\s+|(?:[\p{L}\p{N}_'’]+|[^\s\p{L}\p{N}_'’])\s*/gu) ?? []; // with the spaces after them

export function differing(left, right) {
  const a = words(left), b = words(right);
  const isSame = (i, j) => a[i].trim() === b[j].trim();
  if (a.length * b.length > CELLS_MAX) return [[[left, false]], [[right, false]]];
  const wide = b.length + 1, longest = new Uint16Array((a.length + 1) * wide); // number of common words from here to the end
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      const at = i * wide + j;
      longest[at] = isSame(i, j) ? longest[at + wide + 1] + 1 : Math.max(longest[at + wide], longest[at + 1]);
    }
  }
  // Texts with few words in common are not marked, since nearly all words would be.
  if (3 * longest[0] < Math.max(a.length, b.length)) return [[[left, false]], [[right, false]]];
  const shown = [[], []];
  for (let i = 0, j = 0; i < a.length || j < b.length;) {
    const at = i * wide + j;
    if (i < a.length && j < b.length && isSame(i, j)) { add(shown[0], a[i++], false); add(shown[1], b[j++], false); }
    else if (j === b.length || (i < a.length && longest[at + wide] >= longest[at + 1])) add(shown[0], a[i++], true);
    else add(shown[1], b[j++], true);
  }
  return shown.map((parts) => parts.flatMap(bare));
}

// Leaves spaces at the end of a differing part unmarked.
function bare([text, isDifferent]) {
  const blanks = isDifferent ? text.match(/\s*$/)[0] : "";
  return blanks ? [[text.slice(0, -blanks.length), true], [blanks, false]] : [[text, isDifferent]];
}

function add(parts, text, isDifferent) {
  const last = parts.at(-1);
  if (last && last[1] === isDifferent) last[0] += text;
  else parts.push([text, isDifferent]);
}
