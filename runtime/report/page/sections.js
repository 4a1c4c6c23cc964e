// The sections of the report. Each function returns the elements of one, from all runs. Used by page.js.

function learning() {
  const inBits = runs.every(bitsOf),
        convert = points =>
            !points || !inBits ? points : {...points, y: points.y.map(v => known(v) ? v / Math.LN2 : v)};
  const unit = inBits ? 'bits per byte' : 'nats per token';
  const dashed = many ? '6 3' : '';
  // A validation without held-out data has no number at all.
  const validated = run => {
    const p = column(run, 'validation_loss');
    return p && p.y.some(known) ? convert(p) : null;
  };
  const loss = lineChart({
    title: 'Loss',
    unit,
    canLog: true,
    wide: true,
    broken: 'not a finite number',
    series: runs.flatMap(
        (run, i) =>
            [{
              run,
              label: many ? run.label + ', training' : 'training',
              colour: run.colour,
              points: convert(column(run, 'loss')),
              rough: true
            },
             {
               run,
               label: many ? run.label + ', validation' : 'validation',
               colour: many ? run.colour : colour(1),
               dash: dashed,
               points: validated(run),
               dots: true
             }])
  });
  const byName = (title, of, text, u, names) => lineChart({
    title,
    unit: u,
    text,
    series: runs.flatMap(
        (run, r) => Object.keys(run[of]).length < names ?
            [] :
            Object.keys(run[of]).map((name, i) => ({
                                       run,
                                       label: many ? run.label + ', ' + name : name,
                                       colour: many ? run.colour : colour(i),
                                       dash: many ? DASHES[i % DASHES.length] : '',
                                       points: of === 'tasks' ? run[of][name] : convert(run[of][name]),
                                       dots: true
                                     })))
  });
  const norms = runs.flatMap(
      run =>
          [{
            run,
            label: many ? run.label : 'gradient norm',
            colour: run.colour,
            points: column(run, 'gradient_norm'),
            rough: true
          },
           {
             run,
             label: many ? run.label + ', running median' : 'running median',
             colour: many ? run.colour : colour(1),
             dash: '4 3',
             points: column(run, 'gradient_norm_median')
           }]);
  const skipped = runs.flatMap(
      run => [['spikes_left_out', 'updates left out', ''], ['rows_left_out', 'rows left out', '4 3']].map(
          ([name, label, dash]) => ({
            run,
            label: many ? run.label + ', ' + label : label,
            colour: many ? run.colour : colour(dash ? 1 : 0),
            dash,
            points: column(run, name)
          })));
  return section(
      'Learning', loss, byName('Validation by source', 'validation_sources', figure, unit, 2),
      byName('Validation by task', 'tasks', percent, 'share of exact answers', 1),
      lineChart({title: 'Learning rate', zero: true, series: ofRuns('learning_rate', {label: 'learning rate'})}),
      lineChart({title: 'Gradient norm', canLog: true, broken: 'not a finite number', series: norms}),
      lineChart({title: 'Skipped updates', unit: 'so far', zero: true, series: skipped}));
}

const KINDS = {
  compute: 'computing',
  ring: 'waiting for keys and values',
  reduce: 'waiting for sums of gradients',
  gather: 'waiting for weights',
  other: 'other waiting for ranks',
  data: 'waiting for tokens',
  planning: 'planning',
  offload: 'waiting for offloaded memory'
};
// In the order of their table.
const MEASURES = {
  compute_seconds: 'computing',
  exposed_communication_seconds: 'waiting for ranks',
  exposed_ring_seconds: KINDS.ring,
  exposed_reduce_seconds: KINDS.reduce,
  exposed_gather_seconds: KINDS.gather,
  exposed_offload_seconds: KINDS.offload,
  exposed_planning_seconds: KINDS.planning,
  exposed_data_seconds: KINDS.data,
  tokens: 'tokens',
  memory_bytes: 'memory',
  caches_bytes: 'of it, caches',
  pool_bytes: 'of it, the pool in use',
  pool_cached_bytes: 'of it, the pool\'s free blocks',
  weights_bytes: 'of it, weights',
  gradients_bytes: 'of it, gradients',
  optimizer_bytes: 'of it, the optimizer\'s state',
  activations_bytes: 'of it, activations kept by layers',
  clock_mhz: 'clock'
};

function speed() {
  const parts = [
    lineChart({
      title: 'Tokens per second',
      text: short,
      zero: true,
      series: ofRuns('tokens_per_second', {label: 'tokens/s', rough: true})
    }),
    lineChart({
      title: 'Model FLOPs utilization',
      unit: 'of the devices\' peak',
      text: percent,
      zero: true,
      series: ofRuns('model_flops_utilization', {label: 'MFU', rough: true})
    })
  ];
  for (const run of runs) {
    const {kinds, bars, of} = run.time;
    parts.push(stackedChart({
      title: 'Where time goes' + (many ? ': ' + run.label : ''),
      unit: 'a step, on rank 0',
      text: seconds,
      run,
      of,
      kinds: kinds.map((k, i) => ({label: KINDS[k] || k, colour: colour([0, 1, 2, 4, 7, 5, 3, 6][i])})),
      bars: bars.map(b => [b[0], b[1], ...b.slice(2).map(v => v / (b[1] - b[0]))])
    }));
  }
  return section('Speed', parts);
}

// The plan of metrics or of the log: [[name, bytes], ...] and its total.
function planOf(run) {
  const {plan, text} = run.memory, unit = {B: 1, kB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12};
  if (plan)
    return {
      parts: Object.entries(plan).filter(([name, v]) => name !== 'total' && known(v) && v > 0),
      total: plan.total
    };
  const found = /^([\d.]+) (\w+) planned[^:]*: ([^;]*)/.exec(text || '');
  if (!found || !unit[found[2]]) return null;
  const parts = found[3]
                    .split(', ')
                    .map(p => /^(.*\S) ([\d.]+)$/.exec(p))
                    .filter(Boolean)
                    .map(p => [p[1], p[2] * unit[found[2]]])
                    .filter(p => p[1] > 0);
  return {parts, total: found[1] * unit[found[2]]};
}

function memory() {
  return section('Memory', runs.flatMap(run => {
    const plan = planOf(run), used = run.ranks.measures.memory_bytes || {}, name = many ? ': ' + run.label : '',
          out = [];
    if (used.most) {
      out.push(lineChart({
        title: 'Memory of ranks' + name,
        text: bytes,
        zero: true,
        levels: plan && known(plan.total) ? [{label: 'planned', colour: 'var(--bad)', y: plan.total}] : [],
        series: [['most', 0], ['median', 2], ['least', 5]].map(
            ([m, c]) => ({run, label: m, colour: colour(c), points: used[m]})),
        notes: plan ?
            ['On CPUs a rank\'s memory also holds the program and its libraries, which the plan leaves out.'] :
            []
      }));
    }
    const held = part => last((run.ranks.measures[part + '_bytes'] || {}).most);
    if (plan && plan.parts.length) out.push(planChart(run, plan, name, held));
    return out;
  }));
}

// A line of metrics.jsonl with `slow_rank` or `slow_rank_over` in words.
function slowText(s) {
  const over = s.slow_rank_over !== undefined, rank = over ? s.slow_rank_over : s.slow_rank, to = s.slow_link_to,
        who = `rank ${rank}${s.slow_host ? ' on ' + s.slow_host : ''}`,
        since = known(s.slow_since) ? ` since step ${whole(s.slow_since)}` : '';
  if (to !== undefined)
    return `the link from ${who} to rank ${to} ` +
        (over ? 'keeps the ranks waiting no longer' :
                `is slow: ranks wait ${percent(s.slow_share)} of their time${since}`);
  return over ? `${who} is no longer slower than the others` :
                `${who} takes ${percent(s.slow_share)} longer than the median${since}` +
          (s.slow_waited_for ? `; of its time it waited for ${s.slow_waited_for}` : '');
}

function ranks() {
  return section('Ranks', runs.flatMap(run => {
    const {measures, x, rows, of} = run.ranks, name = many ? ': ' + run.label : '', out = [];
    out.push(rankMap({title: 'Computing, rank by rank' + name, unit: 'a step', text: seconds, x, rows, run, of}));
    const names = Object.keys(MEASURES), unknown = Object.keys(measures).filter(m => !names.includes(m));
    const body = names.filter(m => measures[m]).concat(unknown).map(measure => {
      const v = measures[measure];
      const text = measure.endsWith('_seconds') ? seconds :
          measure.endsWith('_bytes')            ? bytes :
          measure === 'clock_mhz'               ? n => figure(n) + ' MHz' :
                                                  figure;
      return [
        MEASURES[measure] || measure, text(last(v.least)), text(last(v.median)), text(last(v.most)),
        figure(last(v.most_rank))
      ];
    });
    if (body.length)
      out.push(make(
          'div', {class: 'card wide'},
          make('h3', null, 'All ranks' + name, make('small', null, '  at the last logged step')),
          make(
              'div', {class: 'scroll whole'},
              table(['', 'least', 'median', 'most', 'of rank'], body, {right: [1, 2, 3, 4], headed: true}))));
    if (run.slow.length)
      out.push(make(
          'div', {class: 'card wide'}, make('h3', null, 'Slow ranks' + name),
          make('div', {class: 'scroll'}, table(['step', ''], run.slow.map(s => [s.step, slowText(s)]), {right: [0]}))));
    return out;
  }));
}

function sources() {
  return section('Data', runs.flatMap(run => {
    const names = Object.keys(run.sources), name = many ? ': ' + run.label : '';
    if (!names.length) return [];
    const rows = names.map(n => {
      const s = run.sources[n];
      return [n, whole(s.rows), whole(s.targets), whole(s.documents), figure(s.epochs, 3)];
    });
    return [
      names.length > 1 ? lineChart({
        title: 'Tokens by source' + name,
        unit: 'so far',
        text: short,
        zero: true,
        series: names.map((n, i) => ({run, label: n, colour: colour(i), points: run.source_targets[n]}))
      }) :
                         null,
      make(
          'div', {class: 'card'}, make('h3', null, 'What was read' + name),
          make(
              'div', {class: 'scroll whole'},
              table(['source', 'rows', 'targets', 'documents', 'epochs'], rows, {right: [1, 2, 3, 4]})))
    ];
  }));
}

// Results of `annulus evaluate --json` in the run's folder.
function evaluations() {
  const all = runs.flatMap(run => run.evaluations.map(e => ({run, e})));
  const named = ({run, e}) => (many ? run.label + ', ' : '') +
      (e.step === null ? e.file : 'step ' + e.step.toLocaleString('en-US')) +
      (run.evaluations.filter(o => o.step === e.step).length > 1 ? ' (' + e.file + ')' : '');
  const lines =
      all.flatMap(
             one => one.e.sources.filter(s => s.buckets.length)
                        .map(s => ({
                               run: one.run,
                               label: named(one) + (one.e.sources.length > 1 ? ', ' + s.name : ''),
                               points: {x: s.buckets.map(b => b[0]), y: s.buckets.map(b => b[1])},
                               dots: true
                             })))
          .map((s, i) => ({...s, colour: colour(i), dash: DASHES[Math.floor(i / COLOURS.length) % DASHES.length]}));
  const most = Math.max(2, ...lines.flatMap(l => l.points.x)),
        every = Array.from({length: 1 + Math.ceil(Math.log2(most))}, (_, i) => i);
  const each = Math.ceil(every.length / 8);
  const axis = {
    label: 'position in the row, up to',
    at: (run, x) => Math.log2(x),
    text: v => v < 64 ? short(2 ** v) : short(v),
    ticks: every.filter(i => i % each === 0)
  };
  const cells = all.flatMap(
      one => one.e.tasks.map(
          t =>
              [named(one), t.task, whole(t.length), t.depth === null ? '' : percent(t.depth),
               `${t.exact} of ${t.trials}`, percent(t.exact / t.trials)]));
  return section(
      'By position', lineChart({
        title: 'Loss by position',
        unit: 'nats per token, of held-out or given data',
        series: lines,
        wide: true,
        ownAxis: {...axis, text: axis.text}
      }),
      cells.length ?
          make(
              'div', {class: 'card wide'}, make('h3', null, 'Tasks'),
              make(
                  'div', {class: 'scroll'},
                  table(['evaluation', 'task', 'length', 'depth', 'exact', 'share'], cells, {right: [2, 3, 4, 5]}))) :
          null);
}

function checkpoints() {
  const timed = runs.some(run => run.checkpoints.some(c => known(c.durable) || known(c.stopped)));
  const rows = runs.flatMap(
      run => run.checkpoints.map(
          c =>
              [...(many ? [run.label] : []), whole(c.step), c.name, known(c.bytes) ? bytes(c.bytes) : '',
               known(c.ranks) ? c.ranks : '',
               ...(timed ? [known(c.stopped) ? seconds(c.stopped) : '', known(c.durable) ? seconds(c.durable) : ''] :
                           []),
               c.there ? when(c.written) : 'removed since']));
  const heads =
            [
              ...(many ? ['run'] : []), 'step', 'folder', 'size', 'ranks',
              ...(timed ? ['training stood still', 'until durable'] : []), 'written'
            ],
        shift = many ? 1 : 0;
  return section(
      'Checkpoints',
      rows.length ? make(
                        'div', {class: 'card wide'},
                        make('div', {class: 'scroll'}, table(heads, rows, {
                               right: [shift, shift + 2, shift + 3, ...(timed ? [shift + 4, shift + 5] : [])]
                             }))) :
                    null);
}

function log() {
  const parts = runs.map(run => {
    const rows =
        run.log
            .map(
                e =>
                    [e.time.slice(0, 19).replace('T', ' '), make('span', {class: 'level ' + e.level}, e.level),
                     e.ranks.length > 4 ? `${e.ranks[0]} and ${e.ranks.length - 1} more` : e.ranks.join(', '), e.host,
                     e.message +
                         (e.times > 1 ? `\n(${e.times} ${e.last_message ? 'such records' : 'times'}, last at ${
                                            e.last.slice(11, 19)}${e.last_message ? ': ' + e.last_message : ''})` :
                                        '')])
            .reverse();
    return rows.length || many ?
        make(
            'div', {class: 'card wide'}, many ? make('h3', null, run.label) : null,
            rows.length ? make(
                              'div', {class: 'scroll'},
                              table(['time (UTC)', 'level', 'rank', 'host', 'message'], rows, {name: 'log'})) :
                          make('p', {class: 'soft'}, 'none'),
            run.log_left_out ? make(
                                   'p', {class: 'note'},
                                   counted(run.log_left_out, 'earlier entr')
                                           .replace(/entrs?$/, run.log_left_out === 1 ? 'entry' : 'entries') +
                                       ' left out: RUN/logs has them.') :
                               null) :
        make('div', {class: 'card wide'}, make('p', {class: 'soft'}, 'none'));
  });
  return section('Warnings and errors', parts);
}

function about() {
  return section(
      'What was run',
      runs.map(
          run => make(
              'div', {class: 'card' + (many ? '' : ' wide')}, make('h3', null, run.path),
              make('div', {class: 'scroll whole'}, table([], run.facts, {name: 'facts', headed: true})),
              run.notes.map(n => make('p', {class: 'banner'}, n)),
              run.config ? make(
                               'details', null, make('summary', null, 'config.toml'),
                               make('pre', {tabindex: 0}, run.config.trim())) :
                           null)));
}
