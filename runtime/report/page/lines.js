// Charts of lines over steps, such as losses. Used by sections.js.

// An exponential mean over the finite numbers, corrected for its beginning.
function smoothed(y, share) {
  if (!share) return y;
  let mean = 0, weight = 0;
  return y.map(v => {
    if (!known(v)) return v;
    mean = share * mean + (1 - share) * v;
    weight = share * weight + (1 - share);
    return mean / weight;
  });
}

// Lines over steps (or what the page's axis is). A series: label, colour, dash, points {x, y, of}, run, and whether it
// is `rough`, so that the setting of the page smooths it. `levels`: horizontal lines {label, colour, y}.
function lineChart({
  title,
  unit = '',
  text = figure,
  series,
  levels = [],
  canLog = false,
  startsLog = false,
  zero = false,
  wide = false,
  broken = '',
  notes = [],
  ownAxis = null
}) {
  series = series.filter(s => s.points && s.points.x.length);
  if (!series.length) return null;
  const hidden = new Set();
  let log = startsLog, me = null;
  const legend = make(
      'div', {class: 'legend'},
      series.length + levels.length < 2 ?
          null :
          series.map(
              s => make(
                  'button', {
                    type: 'button',
                    'aria-pressed': 'true',
                    onclick: event => {
                      if (!hidden.delete(s)) hidden.add(s);
                      event.currentTarget.setAttribute('aria-pressed', String(!hidden.has(s)));
                      me.redraw();
                    }
                  },
                  key(s.colour, s.dash), s.label)),
      levels.map(l => make('label', null, key(l.colour, '5 4'), l.label + ' ' + text(l.y))));
  const lost = series.filter(s => s.rough)
                   .map(s => [s, s.points.x.filter((x, i) => s.points.y[i] === null)])
                   .filter(l => l[1].length);
  const thin = series.filter(s => s.points.of);
  const paragraphs = [
    ...(broken ? lost.map(
                     ([s, at]) => make(
                         'p', {class: 'note bad'},
                         `${s.label}: ${broken} at ${counted(at.length, 'step')}` + (s.points.of ? ' or more' : '') +
                             `, first at ${whole(at[0])}, last at ${whole(at[at.length - 1])} (marked at the top)`)) :
                 []),
    thin.length ? make(
                      'p', {class: 'note'},
                      `Thinned to what a screen shows: the least and the most of each part of ${
                          counted(Math.max(...thin.map(s => s.points.of)), 'point')}.`) :
                  null,
    ...notes.map(n => make('p', {class: 'note'}, n))
  ];
  const draw = width => {
    const axis = ownAxis || AXES[settings.axis], shownSeries = series.filter(s => !hidden.has(s));
    const lines = shownSeries.map(s => {
      const at = s.points.x.map(v => axis.at(s.run, v));
      return {s, at, raw: s.points.y, y: s.rough ? smoothed(s.points.y, settings.smooth) : s.points.y};
    });
    const fits = v => known(v) && (!log || v > 0);
    const all = [...lines.flatMap(l => l.y), ...levels.map(l => l.y)].filter(fits);
    const every = lines.flatMap(l => l.at).filter(known);
    let low = Math.min(...all), high = Math.max(...all);
    if (!all.length) [low, high] = [log ? 0.1 : 0, 1];
    if (zero && !log) low = Math.min(0, low);
    if (low === high) {
      const d = Math.abs(low) * 0.05 || 1;
      high += d;
      low = log ? low / 1.1 : low === 0 ? 0 : low - d;
    } else if (!log) {
      const d = 0.04 * (high - low);
      high += d;
      if (low !== 0) low -= d;
    }
    const svg = make('svg:svg');
    const xs = every.length ? [Math.min(...every), Math.max(...every)] : [0, 1];
    const f = frame(
        svg, width,
        {xs, ys: [low, high], log, xText: axis.text, yText: v => text(v, 3), xLabel: axis.label, xTicks: axis.ticks});
    for (const mark
             of [...new Map(series.flatMap(
                                s => (ownAxis ? [] : s.run.marks).map(m => [s.run.name + m.step, {...m, run: s.run}])))
                     .values()]) {
      const x = f.x(axis.at(mark.run, mark.step));
      if (known(x))
        svg.append(make(
            'svg:path', {d: `M${x} ${f.top}V${f.bottom}`, stroke: 'var(--soft)', 'stroke-dasharray': '1 3'},
            make('svg:title', null, mark.text)));
    }
    for (const l of levels) {
      if (fits(l.y))
        svg.append(make('svg:path', {
          d: `M${f.left} ${f.y(l.y)}H${f.right}`,
          stroke: l.colour,
          'stroke-dasharray': '5 4',
          'stroke-width': 1.5
        }));
    }
    for (const {s, at, raw, y} of lines) {
      const path = values => {
        let d = '', pen = false;
        values.forEach((v, i) => {
          if (!fits(v) || !known(at[i])) {
            pen = false;
            return;
          }
          const alone = !pen && !(fits(values[i + 1]));
          d += `${pen ? 'L' : 'M'}${f.x(at[i]).toFixed(1)} ${f.y(v).toFixed(1)}` + (alone ? 'h.01' : '');
          pen = true;
        });
        return d;
      };
      const common = {fill: 'none', stroke: s.colour, 'stroke-linejoin': 'round', 'stroke-linecap': 'round'};
      if (y !== raw) {
        const clip = values => values.map(v => fits(v) ? Math.min(high, Math.max(low, v)) : v);
        svg.append(make('svg:path', {...common, d: path(clip(raw)), opacity: 0.25}));
      }
      svg.append(make('svg:path', {
        ...common,
        d: path(y),
        'stroke-width': s.dash ? 1.6 : 1.8,
        'stroke-dasharray': s.dash || null,
        class: 'data'
      }));
      {
        const few = (s.dots && y.length < 60) || y.length < 25, alone = i => !fits(y[i - 1]) && !fits(y[i + 1]);
        y.forEach(
            (v, i) => fits(v) && known(at[i]) && (few || alone(i)) &&
                svg.append(make('svg:circle', {cx: f.x(at[i]), cy: f.y(v), r: 2.2, fill: s.colour})));
      }
      if (broken && s.rough)
        raw.forEach(
            (v, i) => v === null && known(at[i]) &&
                svg.append(
                    make('svg:path', {d: `M${f.x(at[i])} ${f.top - 6}v9`, stroke: 'var(--bad)', 'stroke-width': 2})));
    }
    const stops = [...new Set(lines.flatMap(l => l.at).filter(known).map(f.x))].sort((a, b) => a - b);
    const probe = i => {
      const x = stops[i], gap = Math.max(14, (f.right - f.left) / 40), values = [];
      let heading = '';
      for (const {s, at, raw, y} of lines) {
        const j = nearest(at.map(f.x), x);
        if (j < 0 || Math.abs(f.x(at[j]) - x) > gap) continue;
        const step = 'step ' + s.points.x[j].toLocaleString('en-US');
        const here =
            (ownAxis                      ? axis.label + ' ' + axis.text(s.points.x[j]) :
                 settings.axis === 'step' ? step :
                                            axis.text(at[j]) + ', ' + step);
        if (!heading || f.x(at[j]) === x) heading = here;
        const line = y === raw || !known(raw[j]) ? '' : `  (smoothed ${text(y[j])})`;
        values.push({
          x: f.x(at[j]),
          y: fits(y[j]) ? f.y(y[j]) : null,
          colour: s.colour,
          dash: s.dash,
          label: s.label,
          text: text(raw[j]) + line
        });
      }
      return {x, heading, values};
    };
    return {svg, stops, probe, height: HEIGHT, top: f.top, bottom: f.bottom};
  };
  const tools = canLog ? make(
                             'label', null, make('input', {
                               type: 'checkbox',
                               checked: startsLog,
                               onchange: event => {
                                 log = event.target.checked;
                                 me.redraw();
                               }
                             }),
                             'log') :
                         null;
  const rows = () => tableOfLines(series, text, ownAxis);
  const summary = () => series
                            .map(s => {
                              const y = s.points.y.filter(known);
                              return y.length ? `${s.label}: from ${text(y[0])} to ${text(y[y.length - 1])}, least ${
                                                    text(Math.min(...y))}, most ${text(Math.max(...y))}.` :
                                                `${s.label}: no number.`;
                            })
                            .join(' ');
  me = chart({title, unit, wide, legend, tools, notes: paragraphs, rows, summary}, draw);
  return me;
}

// The numbers of lines at the steps of the one that has the most, at most MOST_ROWS of them.
function tableOfLines(series, text, ownAxis) {
  const all = [...new Set(series.flatMap(s => s.points.x))].sort((a, b) => a - b);
  const count = Math.min(MOST_ROWS, all.length);
  const at =
      Array.from({length: count}, (_, i) => all[count === 1 ? 0 : Math.round(i * (all.length - 1) / (count - 1))]);
  const body = at.map(x => [(ownAxis ? ownAxis.text : v => v.toLocaleString('en-US'))(x), ...series.map(s => {
                        const i = s.points.x.indexOf(x);
                        return i < 0 ? '' : text(s.points.y[i]);
                      })]);
  return {
    heads: [ownAxis ? ownAxis.label : 'step', ...series.map(s => s.label)],
    body,
    right: [...series.keys()].map(i => i + 1).concat(0),
    note: count < all.length ? `${count} of ${counted(all.length, 'point')}, evenly chosen.` : ''
  };
}
