/** Lines as numbers: smoothing, ranges and gaps. Knows neither the page nor pixels. */

/** Lines with at least this share of noise are smoothed by default, with the weight GENTLE. */
const LEAST_NOISE = 0.5;
const LEAST_NOISY = 50;
const GENTLE = 0.8;
const MOST_SPIKES = 60;
/** The range of an axis is computed from this many values of a line; shorter lines than LEAST_CUT have no outliers. */
const SAMPLED = 200;
const LEAST_CUT = 20;

/**
 * Returns the exponential moving average of values, corrected for its start (as Adam's moments are: Kingma and Ba,
 * 2015). A missing value stays missing and doesn't count.
 *
 * @param {(number|null)[]} values
 * @param {number} weight of the past, in [0, 1).
 */
export function smoothed(values, weight) {
  let last = 0,
    count = 0;
  return values.map((value) => {
    if (value === null) return null;
    count += 1;
    last = weight * last + (1 - weight) * value;
    return last / (1 - weight ** count);
  });
}

/** Returns the weight of smoothing in the URL; 0 for none. */
export function weightOf(text) {
  return Math.min(0.999, Math.max(0, Number(text) || 0));
}

/** Returns the weight for a line: the chosen one, or by default a gentle one if the line is mostly noise. */
export function weightFor(values, chosen, isMany) {
  if (chosen !== "" || isMany) return weightOf(chosen);
  const there = values.filter((value) => value !== null);
  if (there.length < LEAST_NOISY) return 0;
  const at = (sorted, share) => sorted[Math.floor(share * (sorted.length - 1))];
  const sorted = there.toSorted((one, other) => one - other);
  const changes = there.slice(1).map((value, index) => Math.abs(value - there[index]));
  // Both estimate a standard deviation from quantiles, so that a spike doesn't count as noise.
  const noise =
    (at(
      changes.sort((one, other) => one - other),
      0.5,
    ) *
      1.48) /
    Math.SQRT2;
  const spread = (at(sorted, 0.9) - at(sorted, 0.1)) / 2.56;
  return spread > 0 && noise / spread > LEAST_NOISE ? GENTLE : 0;
}

/** Returns the first and the last place of each stretch of places that has no value in between. */
export function stretchEnds(places, { x, y }) {
  const there = x.filter((_, index) => y[index] !== null);
  const isApart = (one, other) => {
    const at = nearest(there, (one + other) / 2);
    return at >= 0 && there[at] > one && there[at] < other;
  };
  return places.filter(
    (place, index) =>
      index === 0 ||
      index === places.length - 1 ||
      isApart(places[index - 1], place) ||
      isApart(place, places[index + 1]),
  );
}

/**
 * Returns the spikes of a line: `{x, from, to}`, the largest first.
 *
 * @param {{x: number[], y: (number|null)[], low: (number|null)[], high: (number|null)[]}} line
 */
export function spikesOf({ x, y, low, high }) {
  const there = x.map((_, index) => index).filter((index) => y[index] !== null && low[index] !== null);
  const widths = there.map((index) => Number(high[index]) - Number(low[index]));
  const usual = widths.toSorted((one, other) => one - other)[widths.length >> 1] ?? 0;
  const found = [];
  for (const [at, index] of there.entries()) {
    // A point may be the mean of two values; its neighbour tells which of them stands out.
    const from = Number(y[there[at ? at - 1 : at + 1] ?? index]);
    const [down, up] = [Number(low[index]), Number(high[index])];
    const to = up - from > from - down ? up : down;
    if (up - down > 4 * usual) found.push({ x: x[index], from, to });
  }
  return found
    .sort((one, other) => Math.abs(other.to - other.from) - Math.abs(one.to - one.from))
    .slice(0, MOST_SPIKES);
}

/**
 * Returns the range of an axis for the last four fifths of lines, without outliers; null without values.
 *
 * The first fifth and spikes may leave the chart, so that they don't flatten the rest.
 */
export function rangeOf(lines, isLog) {
  let low = Infinity,
    high = -Infinity;
  const ends = [Infinity, -Infinity];
  const scaled = (value) => (isLog ? Math.log10(value) : value);
  for (const { x, y } of lines) {
    const there = x.map((_, index) => index).filter((index) => y[index] !== null && (!isLog || y[index] > 0));
    if (!there.length) continue;
    const every = Math.max(1, Math.floor(there.length / SAMPLED));
    const start = there.length < LEAST_CUT ? -Infinity : x[there[0]] + (x[there.at(-1)] - x[there[0]]) / 5;
    const values = there
      .filter((index, at) => x[index] >= start && at % every === 0)
      .map((index) => scaled(y[index]));
    const sorted = values.sort((one, other) => one - other);
    const at = (share) => sorted[Math.round(share * (sorted.length - 1))];
    const room = sorted.length < LEAST_CUT ? Infinity : 3 * (at(0.98) - at(0.02));
    low = Math.min(low, Math.max(sorted[0], at(0.02) - room));
    high = Math.max(high, Math.min(sorted.at(-1), at(0.98) + room));
    for (const index of there.filter((index) => x[index] < start)) {
      ends[0] = Math.min(ends[0], scaled(y[index]));
      ends[1] = Math.max(ends[1], scaled(y[index]));
    }
  }
  if (low > high) return null;
  const span = high / 2 - low / 2 || Math.abs(high) * 0.05 || 0.5;
  // Show the start too, as far as it takes less than half of the height.
  const range = [
    Math.max(Math.min(ends[0], low), low - span),
    Math.min(Math.max(ends[1], high), high + span),
  ];
  const edge = (range[1] / 2 - range[0] / 2 || span) / 10;
  const most = isLog ? 300 : Number.MAX_VALUE;
  const within = (value) => Math.max(-most, Math.min(most, value));
  const back = (value) => (isLog ? 10 ** within(value) : within(value));
  return /** @type {[number, number]} */ ([back(range[0] - edge), back(range[1] + edge)]);
}

/** Returns the values of a line outside a range, after its first fifth, as spikes: `{x, from, to}`. */
export function outliersOf({ x, y, low, high }, [bottom, top]) {
  const start = x[0] + (x.at(-1) - x[0]) / 5;
  return x.flatMap((place, at) => {
    if (place < start || y[at] === null) return [];
    const [down, up] = [low?.[at] ?? y[at], high?.[at] ?? y[at]];
    /** @type {{x: number, from: number, to: number}[]} */
    const found = [];
    if (up > top) found.push({ x: place, from: top, to: up });
    if (down < bottom) found.push({ x: place, from: bottom, to: down });
    return found;
  });
}

/** Returns the outline of a band, without missing points. */
export function outline(x, low, high) {
  const there = x.map((_, index) => index).filter((index) => low[index] !== null && high[index] !== null);
  const back = [...there].reverse();
  return {
    x: [...there.map((index) => x[index]), ...back.map((index) => x[index])],
    y: [...there.map((index) => high[index]), ...back.map((index) => low[index])],
  };
}

/** Returns the index of the nearest value in a sorted list; -1 if it is empty. */
export function nearest(list, value) {
  let low = 0,
    high = list.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && Math.abs(list[low - 1] - value) <= Math.abs(list[low] - value) ? low - 1 : low;
}
