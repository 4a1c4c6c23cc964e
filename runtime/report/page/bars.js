// Stacked bars: where the time of steps goes, and planned memory. Used by sections.js.

// Stacked bars from begin to end on the page's axis. bars: [[begin, end, value ...]]; kinds: {label, colour}.
function stackedChart({title, unit, text, kinds, bars, run, of, wide}) {
  const used = kinds.map((k, i) => ({...k, i})).filter(k => bars.some(b => b[2 + k.i] > 0));
  if (!bars.length || !used.length) return null;
  const sum = b => used.reduce((s, k) => s + (b[2 + k.i] || 0), 0);
  const legend = make('div', {class: 'legend'}, used.map(k => make('label', null, key(k.colour, 'fill'), k.label)));
  const notes = of ? [make('p', {class: 'note'}, `${counted(of, 'interval')}, joined to ${bars.length}.`)] : [];
  const draw = width => {
    const axis = AXES[settings.axis], svg = make('svg:svg');
    const at = bars.map(b => [axis.at(run, b[0]) ?? 0, axis.at(run, b[1]) ?? 0]);
    const xs = [Math.min(...at.map(a => a[0])), Math.max(...at.map(a => a[1]))];
    const sorted = bars.map(sum).sort((a, b) => a - b);
    // A first step that plans or packs may take a hundred times as long as the others, which should be seen.
    const typical = sorted[Math.floor(0.95 * (sorted.length - 1))],
          high = Math.min(sorted[sorted.length - 1], 3 * typical) * 1.04;
    const f =
        frame(svg, width, {xs, ys: [0, high], log: false, xText: axis.text, yText: v => text(v), xLabel: axis.label});
    const paths = used.map(() => '');
    bars.forEach((b, j) => {
      let base = 0;
      const x0 = f.x(at[j][0]), x1 = Math.max(f.x(at[j][1]), x0 + 1), gap = x1 - x0 > 5 ? 1 : 0;
      used.forEach((k, n) => {
        const v = b[2 + k.i] || 0, from = f.y(Math.min(base, high)), to = f.y(Math.min(base + v, high));
        if (v > 0 && from > to)
          paths[n] +=
              `M${x0.toFixed(1)} ${from.toFixed(1)}H${(x1 - gap).toFixed(1)}V${to.toFixed(1)}H${x0.toFixed(1)}Z`;
        base += v;
      });
      if (base > high)
        svg.append(make(
            'svg:path', {d: `M${(x0 + x1) / 2 - 4} ${f.top}l4 -6l4 6Z`, fill: 'var(--bad)'},
            make('svg:title', null, 'higher than shown')));
    });
    used.forEach((k, n) => svg.append(make('svg:path', {d: paths[n], fill: k.colour, class: 'data'})));
    const stops = at.map(a => (f.x(a[0]) + f.x(a[1])) / 2);
    const probe = i => ({
      x: stops[i],
      heading: `steps ${(bars[i][0] + 1).toLocaleString('en-US')} to ${bars[i][1].toLocaleString('en-US')}: ${
          text(sum(bars[i]))}`,
      values: used.map(k => ({
                         colour: k.colour,
                         dash: 'fill',
                         label: k.label,
                         text: `${text(bars[i][2 + k.i])}  ${percent(bars[i][2 + k.i] / sum(bars[i]))}`
                       }))
                  .reverse()
    });
    return {svg, stops, probe, height: HEIGHT, top: f.top, bottom: f.bottom};
  };
  const total = used.map(k => bars.reduce((s, b) => s + b[2 + k.i] * (b[1] - b[0]), 0)),
        all = total.reduce((a, b) => a + b, 0);
  const summary = () => used.map((k, i) => [k, total[i] / all])
                            .filter(([, share]) => share >= 0.001)
                            .map(([k, share]) => `${k.label} ${percent(share)}`)
                            .join(', ') +
      '.';
  const every = Math.ceil(bars.length / MOST_ROWS);
  const rows = () => ({
    heads: ['steps', ...used.map(k => k.label), 'together'],
    right: [...used.keys()].map(i => i + 1).concat(used.length + 1),
    body: bars.filter((b, i) => i % every === 0 || i === bars.length - 1)
              .map(b => [`${b[0] + 1} to ${b[1]}`, ...used.map(k => text(b[2 + k.i])), text(sum(b))]),
    note: every > 1 ? `Every ${every}th bar.` : ''
  });
  notes.unshift(make('p', {class: 'note'}, 'Of all time: ' + summary()));
  return chart({title, unit, wide, legend, notes, rows, summary}, draw);
}

// One bar that is divided: plan.parts [[name, bytes], ...]. held(name): the most bytes that a rank was seen to hold.
function planChart(run, plan, name, held) {
  const total = plan.parts.reduce((s, p) => s + p[1], 0), x = i => plan.parts.slice(0, i).reduce((s, p) => s + p[1], 0);
  const legend = make(
      'div', {class: 'legend'},
      plan.parts.map(([part, v], i) => make('label', null, key(colour(i), 'fill'), `${part} ${bytes(v)}`)));
  return chart(
      {
        title: 'Planned memory of a rank' + name,
        unit: bytes(plan.total),
        legend,
        notes: [],
        summary: () => plan.parts.map(([p, v]) => `${p} ${bytes(v)}`).join(', ') + '.',
        rows: () => ({
          heads: ['for', 'planned', 'share', 'held, at most by a rank'],
          right: [1, 2, 3],
          body: plan.parts.map(([p, v]) => [p, bytes(v), percent(v / total), bytes(held(p))])
                    .concat([['together', bytes(plan.total), '', '']])
        })
      },
      width => {
        const svg = make('svg:svg'), scale = width / total;
        plan.parts.forEach(
            ([part, v], i) => svg.append(make(
                'svg:rect', {
                  class: 'data',
                  x: x(i) * scale,
                  y: 6,
                  width: Math.max(0.5, v * scale - 1),
                  height: 34,
                  fill: colour(i)
                },
                make('svg:title', null, part))));
        return {
          svg,
          height: 46,
          top: 2,
          bottom: 44,
          stops: plan.parts.map((p, i) => (x(i) + p[1] / 2) * scale),
          probe: i => ({
            x: (x(i) + plan.parts[i][1] / 2) * scale,
            heading: plan.parts[i][0],
            values: [
              {
                colour: colour(i),
                dash: 'fill',
                label: bytes(plan.parts[i][1]),
                text: percent(plan.parts[i][1] / total)
              },
              ...(known(held(plan.parts[i][0])) ? [{label: 'held', text: bytes(held(plan.parts[i][0]))}] : [])
            ]
          })
        };
      });
}
