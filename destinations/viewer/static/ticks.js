/** Ticks of axes: values, and their texts in one notation. */

const SI = ["", "k", "M", "G", "T", "P", "E"];
const STEPS_OF_TIME = [
  1, 5, 15, 30, 60, 300, 900, 1800, 3600, 10800, 21600, 43200, 86400, 172800, 604800, 2592000,
];
const DAY = 86400;
/** A log scale of fewer decades has ticks between them. */
const FEW_DECADES = 1.5;

function decimalsFor(step) {
  return Math.max(0, Math.min(12, -Math.floor(Math.log10(step) + 1e-9)));
}

/** Returns the texts of numbers in one notation, with as many decimals as a step needs: 497.62k, 497.64k. */
export function sameNotation(values, step) {
  const most = Math.max(...values.map(Math.abs));
  const texts = (size, end) =>
    values.map((value) =>
      value === 0 ? "0" : `${(value / size).toFixed(decimalsFor(step / size))}${end}`.replace("-", "−"),
    );
  if (most >= 1e4 && most < 1e21) {
    let unit = Math.floor(Math.log10(most) / 3 + 1e-9);
    // 200k and 1000k, which need no decimals, rather than 0.2M and 1.0M.
    if (step < 1000 ** unit && most < 1e4 * 1000 ** (unit - 1)) unit -= 1;
    return texts(1000 ** unit, SI[unit]);
  }
  if (most > 0 && (most < 1e-3 || most >= 1e21)) {
    const exponent = Math.floor(Math.log10(most) + 1e-9);
    return texts(10 ** exponent, `e${exponent < 0 ? "−" : ""}${Math.abs(exponent)}`);
  }
  return texts(1, "");
}

/** Returns a step of numbers side by side: five digits of the largest, or as many as tell all of them apart. */
function stepOf(numbers, isApart = true) {
  const sizes = numbers.map(Math.abs).filter(Boolean);
  const places = Math.floor(Math.log10(Math.max(1e-300, ...sizes)));
  // The smallest has a digit at least.
  let power = Math.min(
    places - 4,
    ...sizes.map((size) => Math.max(places - 6, Math.floor(Math.log10(size)))),
  );
  if (numbers.every(Number.isInteger)) power = Math.max(0, power);
  const different = new Set(numbers).size;
  while (isApart && power > places - 15 && new Set(sameNotation(numbers, 10 ** power)).size < different)
    power -= 1;
  return 10 ** power;
}

/**
 * Returns texts of the values of a row or a column, by value, in one notation and with the same decimals.
 *
 * @param {any[]} values those that are no finite numbers have no text.
 * @param {boolean} [isApart] whether different values must have different texts, however many digits that takes.
 * @returns {Map<number, string>}
 */
export function alignedTexts(values, isApart = true) {
  const numbers = [...new Set(values.filter(Number.isFinite))];
  if (!numbers.length) return new Map();
  const texts = sameNotation(numbers, stepOf(numbers, isApart));
  return new Map(numbers.map((value, at) => [value, texts[at]]));
}

/** Returns the signed difference of each value from the first, as `alignedTexts` writes them; "" where one is missing. */
export function differencesOf(values) {
  const numbers = values.filter(Number.isFinite);
  if (!numbers.length) return values.map(() => "");
  const apart = values.map((value) => value - values[0]);
  const shown = [...apart.map((one) => one || 0), ...numbers];
  const texts = sameNotation(shown, stepOf(numbers));
  return apart.map((one, at) => (Number.isFinite(one) ? `${one > 0 ? "+" : ""}${texts[at]}` : ""));
}

/** Returns the smallest 1, 2 or 5 times a power of ten that is at least as large as a number. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * ([1, 2, 5].find((one) => one * power >= least * (1 - 1e-9)) ?? 10);
}

/**
 * Returns the ticks of an axis, as pairs of value and text.
 *
 * @param {string} type "linear", "log" or "date", which has seconds since 1970.
 * @param {[number, number]} range
 * @param {number} most the largest number of ticks.
 * @returns {Array<[number, string]>}
 */
export function ticksOf(type, [low, high], most) {
  if (!(high > low)) return [[low, sameNotation([low], Math.abs(low) || 1)[0]]];
  if (type === "date") return ticksOfTime(low, high, most);
  if (type === "log" && low > 0) {
    const found = ticksOfLog(low, high, most);
    if (found.length > 1) return found;
  }
  const step = roundStep(((high / 2 - low / 2) / (most + 1)) * 2);
  const first = Math.ceil(low / step - 1e-9);
  const values = [];
  for (let at = first; at * step <= high + step * 1e-9 && values.length <= 2 * most; at += 1)
    values.push(Number((at * step).toPrecision(12)));
  const texts = sameNotation(values, step);
  return values.map((value, at) => [value, texts[at]]);
}

function ticksOfLog(low, high, most) {
  const [from, to] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  const isFew = Math.log10(high) - Math.log10(low) < FEW_DECADES;
  const every = Math.max(1, Math.ceil((to - from + 1) / most));
  const values = [];
  for (let power = isFew ? from - 1 : from; power <= to; power += isFew ? 1 : every)
    for (const one of isFew ? [1, 2, 5] : [1]) values.push(Number(`${one}e${power}`));
  return values
    .filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9))
    .map((value) => /** @type {[number, string]} */ ([value, sameNotation([value], value)[0]]));
}

function ticksOfTime(low, high, most) {
  const step =
    STEPS_OF_TIME.find((one) => (high - low) / one <= most) ?? roundStep((high - low) / most / DAY) * DAY;
  const offset = new Date(low * 1000).getTimezoneOffset() * 60;
  const two = (part) => String(part).padStart(2, "0");
  /** @type {Array<[number, string]>} */
  const found = [];
  for (let at = Math.ceil((low - offset) / step) * step + offset; at <= high; at += step) {
    const date = new Date(at * 1000);
    const time = `${two(date.getHours())}:${two(date.getMinutes())}`;
    const day = `${two(date.getMonth() + 1)}-${two(date.getDate())}`;
    found.push([at, step >= DAY ? day : step < 60 ? `${time}:${two(date.getSeconds())}` : time]);
  }
  return found;
}
