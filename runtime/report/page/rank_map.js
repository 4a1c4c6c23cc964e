// The time of each rank over the steps. Used by sections.js.

// A map of values over steps (across) and ranks (downwards), coloured by the ratio to the median of the column.
function rankMap({title, unit, text, x, rows: columns, run, of}) {
  if (!columns.length || columns[columns.length - 1].length < 2) return null;
  const ranks = Math.max(...columns.map(c => c.length));
  const median = list => {
    const s = list.filter(known).sort((a, b) => a - b);
    return s.length ? (s[(s.length - 1) >> 1] + s[s.length >> 1]) / 2 : null;
  };
  const medians = columns.map(median), mean = list => {
    const s = list.filter(known);
    return s.reduce((a, b) => a + b, 0) / s.length;
  };
  const cell = Math.max(5, Math.min(26, 260 / ranks)), height = 44 + cell * ranks;
  const colour = ratio => `color-mix(in srgb, var(--${ratio > 1 ? 'hot' : 'cold'}) ${
      Math.min(100, Math.abs(ratio - 1) * 400).toFixed(0)}%, var(--grid))`;
  const draw = width => {
    const axis = AXES[settings.axis], svg = make('svg:svg'), left = 46, right = width - 10, top = 10,
          bottom = top + cell * ranks;
    const wide = (right - left) / columns.length;
    columns.forEach((column, i) => column.forEach((v, r) => known(v) && svg.append(make('svg:rect', {
      class: 'data',
      x: (left + i * wide).toFixed(1),
      y: (top + r * cell).toFixed(1),
      width: Math.max(1, wide - (wide > 4 ? 1 : 0)).toFixed(1),
      height: Math.max(1, cell - (cell > 4 ? 1 : 0)).toFixed(1),
      fill: colour(v / medians[i])
    }))));
    for (let r = 0; r < ranks; r += Math.ceil(14 / cell))
      svg.append(make('svg:text', {x: left - 6, y: top + (r + 0.5) * cell + 4, 'text-anchor': 'end'}, 'rank ' + r));
    const each = Math.max(1, Math.ceil(columns.length / Math.max(2, Math.floor((right - left) / 90))));
    columns.forEach(
        (c, i) => i % each === 0 &&
            svg.append(make(
                'svg:text', {x: left + (i + 0.5) * wide, y: bottom + 16, 'text-anchor': 'middle'},
                axis.text(axis.at(run, x[i])))));
    svg.append(make('svg:text', {x: (left + right) / 2, y: height - 2, 'text-anchor': 'middle'}, axis.label));
    const stops = columns.map((c, i) => left + (i + 0.5) * wide);
    const probe = i => {
      const order =
          [...columns[i].keys()].filter(r => known(columns[i][r])).sort((a, b) => columns[i][b] - columns[i][a]);
      const some = order.length > 9 ? [...order.slice(0, 5), ...order.slice(-3)] : order;
      return {
        x: stops[i],
        heading: `to step ${x[i].toLocaleString('en-US')}, median ${text(medians[i])}`,
        values: some.map(r => ({
                           colour: colour(columns[i][r] / medians[i]),
                           dash: 'fill',
                           label: 'rank ' + r,
                           text: `${text(columns[i][r])}  ${percent(columns[i][r] / medians[i] - 1)}`
                         }))
      };
    };
    return {svg, stops, probe, height, top, bottom};
  };
  const means = Array.from({length: ranks}, (_, r) => mean(columns.map(c => c[r]))), middle = median(means);
  const rows = () => ({
    heads: ['rank', 'mean', 'over the median of ranks'],
    right: [0, 1, 2],
    body: means.map((v, r) => [r, text(v), percent(v / middle - 1)]),
    note: ''
  });
  const slowest = means.indexOf(Math.max(...means));
  const summary = () => `On average rank ${slowest} takes the longest: ${text(means[slowest])}, ${
      percent(means[slowest] / middle - 1)} more than the median.`;
  const notes = [
    make(
        'p', {class: 'note'},
        summary() + ' Red is slower than the median of a column, blue faster; full colour from 25 %.'),
    of ? make('p', {class: 'note'}, `Means of ${counted(of, 'line')} in ${columns.length} columns.`) : null
  ];
  return chart({title, unit, wide: true, legend: null, notes, rows, summary}, draw);
}
