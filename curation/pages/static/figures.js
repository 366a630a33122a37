// Statistics of an annotator's own answers.

const Z = 1.96; // standard deviations of a 95 % interval

export const isAsLabel = ({ answer, label }) => String(answer) === String(label);

export function figures(rows, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const counted = rows.filter(({ state, answer }) => answer && (state === "decided" || state === "settled"));
  const right = rows.filter(({ state }) => state === "settled").map(isAsLabel);
  const wrongLast = right.lastIndexOf(false);
  return {
    today: counted.filter(({ at }) => at >= midnight).length,
    streak: right.length - 1 - wrongLast,
    agrees: right.length ? interval(right.filter(Boolean).length, right.length) : null,
  };
}

// Wilson's confidence interval, in per cent.
function interval(count, of) {
  const share = count / of, spread = 1 + (Z * Z) / of;
  const middle = (share + (Z * Z) / (2 * of)) / spread;
  const half = (Z / spread) * Math.sqrt((share * (1 - share)) / of + (Z * Z) / (4 * of * of));
  return [middle - half, middle + half].map((part) => Math.round(100 * Math.min(1, Math.max(0, part))));
}
