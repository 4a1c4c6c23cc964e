// The runs of the report (runtime/report/run_data.h has the data), and what of them all its parts use.

const data = JSON.parse(document.getElementById('data').textContent), runs = data.runs, many = runs.length > 1;
const COLOURS = [0, 1, 2, 3, 4, 5, 6, 7].map(i => `var(--c${i})`), DASHES = ['', '6 3', '2 3', '8 3 2 3'];
const colour = i => COLOURS[i % COLOURS.length];
const STATES = {
  complete: 'complete',
  running: 'running',
  stopped: 'stopped',
  failed: 'failed',
  ended: 'ended early'
};
const last = points => points && points.y.length ? points.y[points.y.length - 1] : undefined;
const best = points => points ? Math.min(...points.y.filter(known)) : undefined;

// A run's name, told apart from others of the same name by its path.
runs.forEach((run, i) => {
  if (runs.some((other, j) => j !== i && other.name === run.name))
    run.label = run.path;
  else
    run.label = run.name;
  run.colour = colour(i);
  run.marks = [
    ...run.resumed.map(s => ({step: s, text: `another process began after step ${s}`})),
    ...run.rewinds.map(([from, to]) => ({step: to, text: `back from step ${from} to step ${to}`}))
  ];
});

const column = (run, name) => run.columns[name];
const bitsOf = run => !!column(run, 'bits_per_byte');

// One line of each run.
function ofRuns(name, more = {}) {
  return runs.map(run => ({
                    run,
                    label: many ? run.label : more.label || name,
                    colour: run.colour,
                    points: column(run, name),
                    ...more,
                    ...(many ? {label: run.label} : {})
                  }));
}

function section(title, ...parts) {
  const there = parts.flat().filter(Boolean);
  return there.length ? [make('h2', null, title), make('div', {class: 'cards'}, there)] : [];
}
