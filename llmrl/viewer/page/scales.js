// From numbers to places on a chart, and the numbers at its axes.

// About `most` round numbers between two, both ends within.
function ticksOf(low, high, most, isWhole = false) {
  if (!(high > low)) return [low];
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  let size = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
  if (isWhole) size = Math.max(1, Math.ceil(size));
  const ticks = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) ticks.push(Number((at * size).toPrecision(12)));
  return ticks.length > 1 ? ticks : [low, high];
}

// The vertical scale of some values. It begins at zero where that hides nothing: where no value is negative and they
// differ by a tenth of the highest at least. Otherwise its axis says that it does not.
function verticalScale(values, isLog) {
  let [low, high] = values.length ? extent(values) : [0, 1];
  if (isLog && low > 0) {
    const from = Math.floor(Math.log10(low) + 1e-9), to = Math.max(from + 1, Math.ceil(Math.log10(high) - 1e-9));
    const every = Math.ceil((to - from) / 4), ticks = [];
    for (let power = from; power <= to; power += every) ticks.push(10 ** power);
    return { place: (value) => (Math.log10(value) - from) / (to - from), ticks, note: "log" };
  }
  const isFromZero = low >= 0 && (high === low || high - low >= 0.1 * high);
  if (isFromZero) low = 0;
  if (high === low) [low, high] = high === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  if (!isFromZero) {
    // A hundredth of the value at least: what is smaller is rounding, and its numbers at the axis would all look alike.
    const missing = 0.01 * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
    const room = missing > 0 ? missing / 2 : (high - low) * 0.06;
    [low, high] = [low - room, high + room];
  }
  if (low === 0 && high > 0.5 && high <= 1) high = 1;  // shares and most rewards end there
  const ticks = ticksOf(low, high, 4);
  const note = isLog ? "has values ≤ 0: linear" : isFromZero || (low < 0 && high > 0) ? "" : "not from 0";
  return { place: (value) => (value - low) / (high - low), ticks, note };
}

// Numbers at an axis: as many digits as tell them apart, none more.
function tickText(value, ticks) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6, 3)}M`;
  if (size >= 1e4) return `${number(value / 1e3, 4)}k`;
  const gap = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : size || 1;
  const power = Math.floor(Math.log10(gap) + 1e-9), extra = Math.abs(gap / 10 ** power - 2.5) < 1e-6 ? 1 : 0;
  if (power < -4) return size ? value.toExponential(Math.max(0, Math.floor(Math.log10(size)) - power + extra)) : "0";
  return value.toFixed(Math.max(0, extra - power));
}

// An exponential mean with the bias of its start taken out, as TensorBoard draws it.
function smoothed(points, factor) {
  let last = 0, weight = 0;
  return points.map(([step, value]) => {
    last = factor * last + (1 - factor) * value;
    weight = factor * weight + 1 - factor;
    return [step, last / weight];
  });
}

// How many of the values lie in each of `size` equal parts of [low, high].
function histogram(values, low, high, size) {
  const bins = new Array(size).fill(0);
  for (const value of values) bins[Math.min(size - 1, Math.max(0, Math.floor(((value - low) / (high - low || 1)) * size)))]++;
  return bins;
}

// Between which numbers to count: few different values get a bin each, centred on it.
function binsOf(values, most = 20) {
  const different = [...new Set(values)].sort((a, b) => a - b);
  const [low, high] = [different[0] ?? 0, different.at(-1) ?? 1];
  if (different.length < 2) return { low: low - 0.5, high: low + 0.5, size: 1 };
  const gap = different.slice(1).reduce((least, value, at) => Math.min(least, value - different[at]), Infinity);
  const size = Math.round((high - low) / gap) + 1;
  if (size <= most) return { low: low - gap / 2, high: high + gap / 2, size };
  return { low, high, size: most };
}
