// Fills the report: its head, and below it the sections (sections.js).

function stateOf(run) {
  const age = Date.now() / 1000 - data.made_at,
        late = run.state.kind === 'running' && data.again > 0 && age > 5 * data.again + 30;
  return make(
      'span', {class: 'state ' + (late ? 'ended' : run.state.kind)},
      late ? `running when this was written, ${seconds(age)} ago; no page since` : STATES[run.state.kind]);
}

function head() {
  const run = runs[0], top = document.getElementById('top');
  document.title = runs.map(r => r.label).join(', ') + ' – annulus report';
  top.append(make('h1', null, many ? `${runs.length} runs` : run.label, many ? null : stateOf(run)));
  for (const r of runs) {
    if (r.state.kind === 'failed' || r.state.kind === 'ended')
      top.append(make('p', {class: 'banner ' + r.state.kind}, (many ? r.label + ': ' : '') + r.state.text));
    const bad = (column(r, 'loss') || {y: []}).y.filter(v => v === null).length;
    if (bad)
      top.append(make(
          'p', {class: 'banner failed'},
          `${many ? r.label + ': ' : ''}the loss was not a finite number in ${
              counted(bad, 'logged step')}; such updates are not applied.`));
  }
  top.append(many ? overview() : tiles(run));
  const choose = (name, label, options) => make(
      'label', null, label,
      make(
          'select', {
            onchange: event => {
              settings[name] = name === 'smooth' ? Number(event.target.value) : event.target.value;
              redraws.forEach(r => r());
            }
          },
          options.map(([value, text]) => make('option', {value}, text))));
  const reload = make('input', {type: 'checkbox', checked: location.hash === '#reload'});
  reload.addEventListener('change', () => {
    history.replaceState(null, '', reload.checked ? '#reload' : '#');
    again();
  });
  const again = () =>
      reload.checked && setTimeout(() => reload.checked && location.reload(), 1000 * Math.max(10, data.again));
  again();
  top.append(make(
      'div', {class: 'tools'},
      choose('axis', 'Over', [['step', 'steps'], ['tokens', 'tokens'], ['hours', 'time of training']]),
      choose('smooth', 'Smoothing', [['0', 'none'], ['0.6', 'some'], ['0.9', 'much']]),
      data.again > 0 ? make('label', null, reload, 'reload by itself') : null,
      runs.some(r => r.marks.length) ?
          make('span', null, 'Dotted verticals: the run was resumed or went back to a checkpoint') :
          null));
}

const lossText = (run, nats) => !known(nats) ? (nats === null ? 'not a number' : '–') :
    bitsOf(run)                              ? figure(nats / Math.LN2, 4) :
                                               figure(nats, 4);
const lossUnit = run => bitsOf(run) ? 'bits per byte' : 'nats';

function tiles(run) {
  const tile = (name, value, more) => value === undefined || value === '–' ?
      null :
      make('div', {class: 'tile'}, make('span', null, name), make('b', null, value), more || null);
  const done = run.steps > 0 ? run.step / run.steps : null, loss = column(run, 'loss'),
        validation = column(run, 'validation_loss');
  return make(
      'div', {class: 'tiles'},
      tile(
          'step', run.step.toLocaleString('en-US'),
          run.steps > 0 ?
              [
                make('span', null, 'of ' + run.steps.toLocaleString('en-US')),
                make('progress', {value: done, max: 1, 'aria-label': 'steps done'})
              ] :
              null),
      tile('loss', loss && lossText(run, last(loss)), make('span', null, lossUnit(run))),
      tile(
          'validation', known(last(validation)) ? lossText(run, last(validation)) : undefined,
          make('span', null, 'least ' + lossText(run, best(validation)))),
      tile('tokens/s', short(last(column(run, 'tokens_per_second')))),
      tile('MFU', percent(last(column(run, 'model_flops_utilization')))),
      tile('tokens', short(last(column(run, 'tokens')))),
      tile(
          'time of training', seconds(run.elapsed),
          run.state.kind === 'running' && run.steps > run.step && run.step > 0 ?
              make('span', null, 'about ' + seconds(run.elapsed / run.step * (run.steps - run.step)) + ' left') :
              null),
      tile(
          'warnings, errors',
          `${run.log.filter(e => e.level === 'warn').length}, ${run.log.filter(e => e.level === 'error').length}`));
}

function overview() {
  const rows = runs.map(
      run =>
          [make('span', {class: 'name'}, key(run.colour), run.label), stateOf(run),
           run.step.toLocaleString('en-US') + (run.steps ? ' of ' + run.steps.toLocaleString('en-US') : ''),
           lossText(run, last(column(run, 'loss'))), lossText(run, last(column(run, 'validation_loss'))), lossUnit(run),
           short(last(column(run, 'tokens_per_second'))), percent(last(column(run, 'model_flops_utilization'))),
           seconds(run.elapsed), run.log.length]);
  const heads = ['run', 'state', 'step', 'loss', 'validation', '', 'tokens/s', 'MFU', 'time', 'warnings'];
  const used = [...heads.keys()].filter(i => rows.some(row => row[i] !== '–'));
  const pick = row => used.map(i => row[i]);
  return make('div', {class: 'card overview'}, make('div', {class: 'scroll whole'}, table(pick(heads), rows.map(pick), {
                                                      right: [...used.keys()].filter(i => ![0, 1, 5].includes(used[i]))
                                                    })));
}

head();
document.getElementById('main').replaceChildren(
    ...[learning(), speed(), ranks(), memory(), evaluations(), sources(), checkpoints(), log(), about()].flat());
document.getElementById('foot').append(make(
    'p', null,
    `Written by annulus ${data.version} at ${data.made.replace('T', ' ').replace('Z', '')} UTC, last metrics at ${
        when(Math.max(...runs.map(r => r.written || 0)))} (your clock).` +
        (data.again > 0 ? ` While the run goes on the file is written again every ${seconds(data.again)} or so.` :
                          '')));
redraws.forEach(r => r());
document.body.dataset.ready = 'yes';
