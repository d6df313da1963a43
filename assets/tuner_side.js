// The left side: the recommendation, where numbers come from, at what price, which tree, and the job under way.

import { h } from './dom.js';
import { download } from './exports.js';
import { sizeKnob } from './knobs.js';
import { fill } from './tuner_charts.js';

export function createSide(page, go) {
  const { t } = page;
  const advice = createAdvice(page);
  const sources = createSources(page);
  const price = createPrice(page);
  const choice = createChoice(page, go);
  const job = createJob(page);
  const body = h('div', { class: 'mv-tuner-body' }, advice.element, sources.element, choice.element, price.element);
  return {
    element: h('section', { class: 'mv-panel mv-tuner-side', 'aria-label': t('tuner.advice') }, body, job.element),
    draw(view) {
      advice.draw(view);
      body.dataset.ready = String(view.ready);
      for (const part of [sources, choice, price, job]) {
        part.element.hidden = !view.ready;
        if (view.ready) part.draw(view);
      }
      if (view.give?.file) download(view.give.name, view.give.file);
    },
  };
}

function createAdvice(page) {
  const { t } = page;
  const title = h('h2', { class: 'mv-advice-title' });
  const text = h('p', { class: 'mv-advice-text' });
  const take = h('button', { id: 'tuner-take', onclick: () => page.act('take') }, t('tuner.take'));
  const element = h('div', { class: 'mv-advice', role: 'group', 'aria-label': t('tuner.advice') },
    h('div', { class: 'mv-advice-head' }, title, take), text, h('p', { class: 'mv-advice-note' }, t('tuner.greedy_only')));
  return {
    element,
    draw({ advice }) {
      element.dataset.state = advice.state;
      title.textContent = advice.title;
      text.textContent = advice.text;
      take.hidden = advice.state !== 'tree';
      take.disabled = Boolean(advice.taken);
      take.textContent = t(advice.taken ? 'tuner.taken' : 'tuner.take');
    },
  };
}

// Accuracies and step times: where they come from, and the button that measures them.
function createSources(page) {
  const { t } = page;
  const make = (name, action) => {
    const said = h('p', { class: 'mv-source-text' });
    const details = h('p', { class: 'mv-source-details' });
    const button = h('button', { id: `tuner-${action}`, onclick: () => page.act(action) });
    return { said, details, button, element: h('div', { class: 'mv-source', role: 'group', 'aria-label': t(`tuner.${name}`) },
      h('h3', {}, t(`tuner.${name}`)), said, details, button) };
  };
  const rates = make('accuracy', 'calibrate');
  const times = make('times', 'time');
  return {
    element: h('div', { class: 'mv-sources' }, rates.element, times.element),
    draw({ sources, job }) {
      rates.said.textContent = sources.rates;
      rates.said.title = sources.rates_hint;
      times.said.textContent = sources.times;
      times.details.textContent = sources.details;
      rates.button.textContent = sources.calibrate;
      times.button.textContent = sources.time;
      rates.element.dataset.kind = sources.rates_kind;
      times.element.dataset.kind = sources.times_kind;
      times.button.classList.toggle('mv-action', !sources.own && sources.rates_kind !== 'none');
      rates.button.classList.toggle('mv-action', sources.rates_kind === 'none');
      rates.button.disabled = times.button.disabled = Boolean(job?.live);
    },
  };
}

// Which device, prefix and batch a step is priced by.
function createPrice(page) {
  const { t } = page;
  const device = h('select', { id: 'tuner-device', 'aria-label': t('tuner.device'),
    onchange: () => page.act('price', { elsewhere: device.value === 'loaded' }) });
  const prefix = h('select', { id: 'tuner-prefix', 'aria-label': t('tuner.prefix_label'),
    onchange: () => page.act('price', { curve: Number(prefix.value) }) });
  const batches = h('div', { class: 'mv-batches', role: 'group', 'aria-label': t('tuner.batch'), title: t('tuner.batch_hint') });
  const beyond = h('p', { class: 'mv-form-help' }, t('tuner.batch_beyond_note'));
  const dialog = createCurveDialog(page);
  const save = h('button', { id: 'tuner-save-curve', onclick: () => page.act('save_curve') }, t('tuner.save_curve'));
  const row = (label, ...fields) => h('div', { class: 'mv-form-row' }, h('span', { class: 'mv-form-label', 'aria-hidden': 'true' }, label), ...fields);
  const element = h('div', { class: 'mv-price' }, row(t('tuner.batch'), batches), beyond,
    row(t('tuner.prefix_label'), h('div', { class: 'mv-price-what' }, prefix, device)), h('div', { class: 'mv-price-files' },
      h('button', { id: 'tuner-load-curve', onclick: () => dialog.showModal() }, t('tuner.load_curve')), save), dialog);
  return {
    element,
    draw({ controls, sources }) {
      fill(device, [['own', t('tuner.this_device')], ...(sources.loaded ? [['loaded', sources.loaded]] : [])]);
      device.value = sources.elsewhere ? 'loaded' : 'own';
      const prefixes = controls.prefixes.length ? controls.prefixes : [t('tuner.prefix_none')];
      fill(prefix, prefixes.map((label, at) => [String(at), label]));
      prefix.value = String(controls.curve);
      prefix.disabled = controls.prefixes.length < 2;
      save.disabled = !sources.own;
      if (batches.children.length !== controls.batches.length) {
        batches.replaceChildren(...controls.batches.map(({ n }) => h('button', { 'data-batch': n,
          onclick: () => page.act('price', { batch: n }) }, h('b', {}, String(n)), h('small'))));
      }
      controls.batches.forEach(({ n, text }, at) => {
        const button = batches.children[at];
        button.setAttribute('aria-pressed', String(n === controls.batch));
        button.lastChild.textContent = text || '–';
      });
      beyond.hidden = !controls.batches.some(({ text }) => text.endsWith('*'));
    },
  };
}

function createCurveDialog(page) {
  const { t } = page;
  const paste = h('textarea', { id: 'curve-text', rows: 8, spellcheck: 'false', 'aria-label': t('tuner.curve_paste'), placeholder: t('tuner.curve_paste') });
  const file = h('input', { type: 'file', id: 'curve-file', accept: '.json,application/json', 'aria-label': t('tuner.curve_file') });
  const dialog = h('dialog', { class: 'mv-dialog mv-curve-dialog', 'aria-label': t('tuner.load_curve') });
  const load = async (text, name) => {
    const view = await page.act('load_curve', { text, name });
    dialog.close();
    if (view && !view.notice) paste.value = '';
    file.value = '';
  };
  file.addEventListener('change', async () => {
    if (file.files[0]) load(await file.files[0].text(), file.files[0].name);
  });
  dialog.append(h('p', {}, t('tuner.curve_hint')), paste, file, h('div', { class: 'mv-dialog-buttons' },
    h('button', { onclick: () => dialog.close() }, t('tuner.close')),
    h('button', { id: 'curve-load', class: 'mv-action', onclick: () => load(paste.value, '') }, t('tuner.load'))));
  return dialog;
}

// Builder and budget, or a published tree; the chosen tree in numbers; where to take it.
function createChoice(page, go) {
  const { t, explorer } = page;
  const kind = h('select', { id: 'tuner-kind', 'aria-label': t('tuner.builder') });
  const published = h('optgroup', { label: t('tuner.group_published') });
  const builders = h('optgroup', { label: t('tuner.group_builders') });
  const own = h('optgroup', { label: t('tuner.group_own') }, new Option(t('tuner.group_own'), 'own'));
  kind.append(builders, published, own);
  let current = null;
  kind.addEventListener('change', () => {
    const [name, tree] = kind.value.split(':');
    if (name === 'own') kind.value = valueOf(current);
    else page.act('choose', tree ? { kind: name, name: tree } : { kind: name });
  });
  const budget = sizeKnob(t, (value) => { if (!current.fixed) page.act('choose', { kind: current.kind, budget: value }); },
    'tuner-budget', 'tuner.budget');
  const another = h('button', { id: 'tuner-seed', onclick: () => page.act('choose', { kind: current.kind, budget: current.budget,
    seed: Math.floor(Math.random() * 2 ** 31) }) }, t('tuner.seed'));
  const sized = h('button', { id: 'tuner-sized', title: t('tuner.sized_hint'),
    onclick: () => page.act('choose', { kind: current.kind, budget: current.sized.nodes }) }, t('tuner.sized'));
  const help = h('p', { class: 'mv-form-help mv-choice-help' });
  const facts = h('dl', { class: 'mv-facts mv-tuner-facts' });
  const notes = h('p', { class: 'mv-form-help mv-choice-notes', role: 'status' });
  const use = h('button', { id: 'tuner-use', class: 'mv-action', title: t('tuner.use_hint'), onclick: async () => {
    const view = await page.act('use');
    if (!view?.give?.tree) return;
    explorer.openPage('explorer');
    await explorer.act('tree', view.give.tree);
  } }, t('tuner.use'));
  const measure = h('button', { id: 'tuner-measure', title: t('tuner.measure_hint'), onclick: go.measure }, t('tuner.measure'));

  return {
    element: h('div', { class: 'mv-choice', role: 'group', 'aria-label': t('tuner.tree') },
      h('div', { class: 'mv-choice-kind' }, kind, another, sized), budget.element, help, facts, notes,
      h('div', { class: 'mv-choice-go' }, use, measure)),
    draw({ controls, chosen }) {
      current = controls;
      drawKinds(controls);
      another.hidden = !controls.seeded;
      sized.hidden = !controls.sized;
      sized.disabled = [null, controls.budget].includes(controls.sized?.nodes ?? null);
      if (!page.link.queue.length) budget.set(controls.budget, controls.detents);
      budget.disable(controls.fixed ? t(`tuner.help_${controls.kind}`) : '');
      help.textContent = controls.fixed ? t(`tuner.help_${controls.kind}`)
        : controls.sized ? `${controls.help}. ${controls.sized.text}` : controls.help;
      facts.replaceChildren(...chosen.facts.flatMap(({ label, value, hint, key }) => [
        h('dt', { title: hint }, label), h('dd', { title: hint, 'data-fact': key }, value)]));
      notes.textContent = chosen.notes.join('; ');
      notes.title = notes.textContent;
    },
  };

  function drawKinds(controls) {
    const key = JSON.stringify([controls.kinds, controls.published]);
    if (kind.dataset.key !== key) {
      kind.dataset.key = key;
      builders.replaceChildren(...controls.kinds.map(({ name, label, lacking }) => {
        const option = new Option(lacking ? `${label} (${lacking})` : label, name);
        option.disabled = Boolean(lacking);
        return option;
      }));
      published.replaceChildren(...controls.published.map((name) => new Option(name, `published:${name}`)));
    }
    own.hidden = own.disabled = controls.kind !== 'own';
    kind.value = valueOf(controls);
  }
}

const valueOf = ({ kind, name }) => (kind === 'published' ? `published:${name}` : kind);

// The job under way stands in one place, whichever it is.
function createJob(page) {
  const { t } = page;
  const text = h('p', { class: 'mv-job-text', role: 'status' });
  const bar = h('i');
  const cancel = h('button', { id: 'tuner-cancel', title: t('tuner.cancel_hint'), onclick: () => page.act('cancel') }, t('tuner.cancel'));
  const element = h('div', { class: 'mv-job' }, text, cancel, h('div', { class: 'mv-run-bar', 'aria-hidden': 'true' }, bar));
  return {
    element,
    draw({ job }) {
      element.dataset.job = job?.live ? job.name : '';
      text.textContent = job?.text ?? t('tuner.no_job');
      text.title = text.textContent;
      cancel.disabled = !job?.live;
      bar.style.width = `${100 * (job?.fraction ?? 0)}%`;
      bar.parentElement.toggleAttribute('data-unknown', Boolean(job?.live) && job.fraction === null);
    },
  };
}
