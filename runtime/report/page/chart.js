// What the charts of the report share (lines.js, bars.js, rank_map.js). Each is a figure that draws itself again when
// its width or the settings of the page change, shows figures under the pointer or by the arrow keys, and has its
// numbers in a table.

const HEIGHT = 220, MOST_ROWS = 60;
const settings = {
  axis: 'step',
  smooth: 0
};
const redraws = [];

// The frame of a chart. `draw(width)` returns an SVG and `probe`: for a place in it [x, heading, rows of the tip].
function chart({title, unit, wide, legend, tools, notes, rows, summary}, draw) {
  const plot = make('div', {class: 'plot'}), tip = make('div', {class: 'tip', hidden: true});
  const details = make('details', null, make('summary', null, 'Table'));
  details.addEventListener('toggle', () => {
    if (details.open && details.children.length === 1) {
      const {heads, body, right, note} = rows();
      details.append(
          make('div', {class: 'scroll', tabindex: 0}, table(heads, body, {right})),
          note ? make('p', {class: 'note'}, note) : '');
    }
  });
  const figure = make(
      'figure', {class: 'card' + (wide ? ' wide' : '')},
      make('div', {class: 'head'}, make('h3', null, title, unit ? make('small', null, '  ' + unit) : null), tools),
      legend || null, plot, notes, details);
  let state = null;
  const place = at => {
    if (!state || !state.stops.length) return;
    const i = Math.max(0, Math.min(state.stops.length - 1, at)), {x, heading, values} = state.probe(i);
    state.at = i;
    state.cursor.setAttribute('d', `M${x} ${state.top}V${state.bottom}`);
    state.dots.replaceChildren(
        ...values.filter(v => known(v.y))
            .map(
                v => make(
                    'svg:circle',
                    {cx: v.x ?? x, cy: v.y, r: 3.5, fill: v.colour, stroke: 'var(--card)', 'stroke-width': 1.5})));
    tip.replaceChildren(
        make('b', null, heading),
        make(
            'table', null,
            make(
                'tbody', null,
                values.map(
                    v => make(
                        'tr', null, make('td', null, v.colour ? key(v.colour, v.dash) : ''), make('td', null, v.label),
                        make('td', {class: 'n'}, v.text))))));
    tip.hidden = false;
    const left = x < state.width / 2;
    tip.style.left =
        left ? Math.min(x + 12, state.width - tip.offsetWidth) + 'px' : Math.max(0, x - 12 - tip.offsetWidth) + 'px';
  };
  const leave = () => {
    tip.hidden = true;
    if (state) {
      state.cursor.removeAttribute('d');
      state.dots.replaceChildren();
    }
  };
  const redraw = () => {
    const width = plot.clientWidth;
    if (!width) return;
    leave();
    state = draw(width);
    state.width = width;
    state.cursor = make('svg:path', {stroke: 'var(--soft)', 'stroke-dasharray': '3 3', 'pointer-events': 'none'});
    state.dots = make('svg:g', {'pointer-events': 'none'});
    state.svg.append(state.cursor, state.dots);
    for (const [name, value] of Object.entries({
           role: 'img',
           tabindex: 0,
           width,
           height: state.height,
           viewBox: `0 0 ${width} ${state.height}`,
           'aria-label': title + (unit ? ', ' + unit : '') + '. ' + summary() +
               ' Arrow keys show single figures; a table follows.'
         })) {
      state.svg.setAttribute(name, value);
    }
    const move = event => place(nearest(state.stops, event.clientX - state.svg.getBoundingClientRect().left));
    state.svg.addEventListener('pointermove', move);
    state.svg.addEventListener('pointerdown', move);
    state.svg.addEventListener('pointerleave', leave);
    state.svg.addEventListener('blur', leave);
    state.svg.addEventListener('keydown', event => {
      const step = {ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -1e9, End: 1e9}[event.key];
      if (event.key === 'Escape') leave();
      if (!step) return;
      event.preventDefault();
      place((state.at ?? (step > 0 ? -1 : state.stops.length)) + step);
    });
    plot.replaceChildren(state.svg, tip);
  };
  redraws.push(redraw);
  new ResizeObserver(() => {
    if (!state || plot.clientWidth !== state.width) redraw();
  }).observe(plot);
  return Object.assign(figure, {redraw});
}

// Axes and grid; returns the scales and where the plot lies.
function frame(svg, width, {xs, ys, log, xText, yText, height = HEIGHT, xTicks = null, xLabel = ''}) {
  const yTicks = log ? powers(ys[0], ys[1]) : ticks(ys[0], ys[1], 5);
  const left = 12 + 6.3 * Math.max(1, ...yTicks.map(t => yText(t).length)), right = width - 10, top = 10,
        bottom = height - 34;
  const scale = log ? Math.log10 : v => v, [y0, y1] = ys.map(scale), span = xs[1] - xs[0] || 1;
  const x = v => left + (right - left) * (v - xs[0]) / span;
  const y = v => bottom - (bottom - top) * (scale(v) - y0) / (y1 - y0 || 1);
  for (const t of yTicks) {
    svg.append(
        make('svg:path', {d: `M${left} ${y(t)}H${right}`, stroke: 'var(--grid)'}),
        make('svg:text', {x: left - 6, y: y(t) + 4, 'text-anchor': 'end'}, yText(t)));
  }
  for (const t of xTicks || ticks(xs[0], xs[1], Math.max(2, Math.floor((right - left) / 90)))) {
    svg.append(make(
        'svg:text', {x: Math.min(x(t), right - 2), y: bottom + 16, 'text-anchor': x(t) > right - 14 ? 'end' : 'middle'},
        xText(t)));
  }
  svg.append(
      make('svg:path', {d: `M${left} ${bottom}H${right}`, stroke: 'var(--line)'}),
      make('svg:text', {x: (left + right) / 2, y: height - 4, 'text-anchor': 'middle'}, xLabel));
  return {x, y, left, right, top, bottom};
}

const AXES = {
  step: {label: 'step', at: (run, step) => step, text: v => short(v)},
  tokens: {
    label: 'tokens',
    at: (run, step) => interpolated(run.columns.tokens || {x: [], y: []}, step),
    text: v => short(v)
  },
  hours: {label: 'time of training', at: (run, step) => interpolated(run.columns.elapsed, step), text: v => seconds(v)},
};
