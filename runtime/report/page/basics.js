// What the other scripts of the report share: elements, numbers as text, scales. page/embed.py joins the scripts into
// one.
'use strict';

const SVG = 'http://www.w3.org/2000/svg';

// Makes an element with attributes and children; text is always text, never HTML. A child that is null is left out.
function make(tag, attributes, ...children) {
  const [name, space] = tag.startsWith('svg:') ? [tag.slice(4), SVG] : [tag, 'http://www.w3.org/1999/xhtml'];
  const element = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith('on'))
      element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(key, value === true ? '' : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

const known = v => typeof v === 'number' && isFinite(v);

// A number with at most `digits` significant digits, and commas where it is large.
function figure(v, digits = 4) {
  if (!known(v)) return v === null ? 'not a number' : '–';
  if (v === 0) return '0';
  const size = Math.abs(v);
  if (size >= 1e15 || size < 1e-4) return v.toExponential(Math.max(0, digits - 1)).replace(/\.?0+e/, 'e');
  if (size >= 10 ** (digits - 1)) return Math.round(v).toLocaleString('en-US');
  return String(Number(v.toPrecision(digits)));
}

function scaled(v, units, step) {
  let i = 0, size = Math.abs(v);
  while (size >= step && i + 1 < units.length) {
    size /= step;
    i++;
  }
  return [Math.sign(v) * size, units[i]];
}

function bytes(v) {
  if (!known(v)) return '–';
  const [size, unit] = scaled(v, ['B', 'kB', 'MB', 'GB', 'TB', 'PB'], 1000);
  return figure(size, 3) + ' ' + unit;
}

// "12k", "3.5M": for axes and tiles.
function short(v) {
  if (!known(v)) return '–';
  if (Math.abs(v) < 10000) return figure(v);
  const [size, unit] = scaled(v, ['', 'k', 'M', 'G', 'T', 'P'], 1000);
  return figure(size, 3) + unit;
}

function seconds(v) {
  if (!known(v)) return '–';
  const size = Math.abs(v);
  if (size === 0) return '0 s';
  if (size < 1e-3) return figure(v * 1e6, 3) + ' µs';
  if (size < 1) return figure(v * 1e3, 3) + ' ms';
  if (size < 100) return figure(v, 3) + ' s';
  const two = n => String(n).padStart(2, '0'), s = Math.round(size);
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? h + ':' + two(m) + ':' + two(s % 60) : m + ':' + two(s % 60);
}

const whole = v => known(v) ? v.toLocaleString('en-US') : '–';
const percent = v => known(v) ? figure(100 * v, 3) + ' %' : '–';
const counted = (n, noun) => n.toLocaleString('en-US') + ' ' + noun + (n === 1 ? '' : 's');
const when = at => known(at) ? new Date(1000 * at).toLocaleString('sv-SE') : '–';

// Round numbers from about `low` to `high`, about `count` of them.
function ticks(low, high, count) {
  const raw = (high - low) / Math.max(1, count), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map(f => f * power).find(s => s >= raw * 0.999) || raw;
  const out = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9 && out.length < 50; i++) out.push(i * step);
  return out;
}

function powers(low, high) {
  const out = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first <= 2 ? [1, 2, 5] : [1], every = Math.ceil((last - first) / 7);
  for (let p = first; p <= last; p++) {
    if (factors.length === 1 && (p - first) % every) continue;
    for (const f of factors)
      if (f * 10 ** p >= low * 0.999 && f * 10 ** p <= high * 1.001) out.push(f * 10 ** p);
  }
  return out;
}

// The index of the number of an ascending list that is nearest to v; -1 for an empty list.
function nearest(list, v) {
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < v)
      low = middle + 1;
    else
      high = middle;
  }
  return low > 0 && v - list[low - 1] <= list[low] - v ? low - 1 : low;
}

// The value at x of the line through ascending points.
function interpolated(points, x) {
  const {x: xs, y: ys} = points;
  if (!xs.length) return null;
  let i = nearest(xs, x);
  if (xs[i] > x && i > 0) i--;
  if (i + 1 >= xs.length || xs[i] >= x) return xs[i] > x && xs[i] > 0 ? ys[i] * x / xs[i] : ys[i];
  return ys[i] + (ys[i + 1] - ys[i]) * (x - xs[i]) / (xs[i + 1] - xs[i]);
}

// A table; columns whose cells are numbers or end with one are aligned to the right by the class of `right`.
function table(heads, rows, {right = [], name = '', headed = false} = {}) {
  const cell = (tag, value, i) =>
      make(tag, {class: right.includes(i) && 'n', scope: tag === 'th' && 'col'}, value ?? '');
  return make(
      'table', {class: name},
      heads.length ? make('thead', null, make('tr', null, heads.map((h, i) => cell('th', h, i)))) : null,
      make(
          'tbody', null,
          rows.map(
              row => make(
                  'tr', null,
                  row.map(
                      (value, i) => headed && i === 0 ? make('th', {scope: 'row'}, value) : cell('td', value, i))))));
}

const key = (colour, dash) => make(
    'svg:svg', {class: 'key', viewBox: '0 0 18 10', 'aria-hidden': 'true'},
    dash === 'fill' ?
        make('svg:rect', {width: 18, height: 10, rx: 2, fill: colour}) :
        make('svg:path', {d: 'M0 5H18', stroke: colour, 'stroke-width': 2.5, 'stroke-dasharray': dash || null}));
