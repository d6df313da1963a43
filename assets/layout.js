// The page's skeleton, built once; every panel later fills its own part.

import { h, icon, symbol } from './dom.js';

const PHASES = ['propose', 'verify', 'accept', 'commit'];
const LEGEND = ['accepted', 'shorter', 'behind', 'rejected', 'next'];
const SEGMENTS = ['tree', 'mask', 'verdict', 'knobs'];

// Builds everything below `root` and returns the parts by name; a prompt has at most `longest` characters.
export function buildLayout(root, t, longest) {
  const parts = { root };
  root.className = 'mv';
  root.append(
    header(parts, t),
    h('div', { class: 'mv-view', 'data-view': 'explorer' },
      textStrip(parts, t, longest),
      controlStrip(parts, t),
      segments(parts, t),
      main(parts, t),
      h('section', { id: 'merits', class: 'mv-merits', 'aria-label': t('ui.merits') }),
      sliderStrip(parts, t)),
    helpDialog(parts, t),
  );
  parts.merits = root.querySelector('#merits');
  return parts;
}

function header(parts, t) {
  parts.nav = h('nav', { class: 'mv-nav', 'aria-label': t('ui.pages') });
  parts.status = h('p', { id: 'model-status', class: 'mv-status', role: 'status' });
  parts.model = h('p', { class: 'mv-model' });
  parts.banner = h('p', { class: 'mv-banner', hidden: true });
  parts.theme = h('button', { id: 'theme', class: 'mv-tool', 'aria-label': t('ui.theme'), title: t('ui.theme') }, icon('theme'));
  parts.projector = h('button', { id: 'projector', class: 'mv-tool', 'aria-label': t('ui.projector'), title: t('ui.projector') },
    icon('projector'));
  parts.help = h('button', { id: 'help', class: 'mv-tool', 'aria-label': t('ui.help'), title: t('ui.help') }, icon('help'));
  parts.progress = h('div', { class: 'mv-progress', hidden: true });
  return h('header', { class: 'mv-header' },
    h('h1', {}, t('ui.title')), parts.nav, parts.model, parts.status, parts.banner, parts.theme, parts.projector, parts.help,
    parts.progress);
}

function textStrip(parts, t, longest) {
  parts.prompt = h('textarea', { rows: 2, 'aria-label': t('ui.prompt'), placeholder: t('ui.prompt_placeholder'),
    spellcheck: 'false', autocomplete: 'off', maxlength: longest });
  parts.start = h('button', { id: 'start', class: 'mv-action' }, t('ui.start'));
  parts.examples = h('select', { id: 'examples', 'aria-label': t('ui.examples') });
  parts.promptNote = h('p', { class: 'mv-note' });
  parts.chips = h('span', { class: 'mv-chips' });
  parts.pending = h('span', { class: 'mv-chips mv-pending' });
  parts.caret = h('span', { class: 'mv-caret', title: t('ui.pending_note') }, t('ui.pending'));
  parts.branches = h('div', { class: 'mv-branches', role: 'group', 'aria-label': t('ui.branches') });
  parts.text = h('div', { id: 'text', class: 'mv-text', tabindex: 0, role: 'group', 'aria-label': t('ui.text') },
    parts.chips, parts.caret, parts.pending);
  return h('section', { class: 'mv-strip', 'aria-label': t('ui.text') },
    h('div', { id: 'prompt', class: 'mv-prompt' }, parts.prompt,
      h('div', { class: 'mv-prompt-row' }, parts.examples, parts.start), parts.promptNote),
    h('div', { class: 'mv-text-box' }, parts.text, parts.branches));
}

function controlStrip(parts, t) {
  const tool = (id) => h('button', { id, class: 'mv-tool', 'aria-label': t(`ui.${id}`), title: t(`ui.${id}_hint`) }, icon(id));
  for (const id of ['back', 'forward', 'play', 'pause', 'reset']) parts[id] = tool(id);
  parts.pause.hidden = true;
  parts.step = h('button', { id: 'step', class: 'mv-action' }, t('ui.step'));
  parts.speed = h('select', { id: 'speed', 'aria-label': t('ui.speed'), title: t('ui.speed') });
  parts.phases = PHASES.map((name, index) => h('button', { 'data-phase': index + 1, title: t(`ui.${name}_hint`) },
    h('b', {}, t(`ui.${name}`)), h('span', { class: 'mv-ms' })));
  parts.phase = h('div', { id: 'phase', class: 'mv-phase', role: 'group', 'aria-label': t('ui.phases') }, ...parts.phases);
  parts.headline = h('p', { id: 'headline', class: 'mv-headline', 'aria-live': 'polite' });
  return h('section', { class: 'mv-control', 'aria-label': t('ui.controls') },
    h('div', { class: 'mv-transport' },
      parts.back, parts.step, parts.forward, parts.play, parts.pause, parts.speed, parts.reset),
    parts.phase, parts.headline);
}

// Phone only: one panel at a time.
function segments(parts, t) {
  parts.segments = SEGMENTS.map((name) => h('button', { 'data-segment': name }, t(`ui.segment_${name}`)));
  return h('nav', { class: 'mv-segments', 'aria-label': t('ui.segments') }, ...parts.segments);
}

function main(parts, t) {
  parts.drawer = h('button', { class: 'mv-drawer-button', 'aria-expanded': 'false' }, t('ui.segment_knobs'));
  parts.knobs = h('section', { class: 'mv-panel mv-knobs', 'data-panel': 'knobs', 'aria-label': t('ui.knobs') });
  // Gradio's own frame is the document's main landmark.
  parts.main = h('div', { class: 'mv-main', 'data-segment': 'tree' },
    parts.knobs, treePanel(parts, t), h('div', { class: 'mv-side' }, maskPanel(parts, t), tabsPanel(parts, t)));
  return parts.main;
}

function treePanel(parts, t) {
  parts.treePlot = h('div', { class: 'mv-plot', role: 'group', 'aria-label': t('ui.tree') });
  parts.outline = h('div', { class: 'mv-outline', role: 'tree', tabindex: 0, 'aria-label': t('ui.outline') });
  parts.overlay = h('div', { class: 'mv-overlay', 'aria-hidden': 'true' });
  parts.predict = h('input', { type: 'checkbox', id: 'predict' });
  parts.verify = h('button', { id: 'verify', class: 'mv-action', hidden: true, 'aria-describedby': 'headline' });
  parts.sentence = h('p', { class: 'mv-sentence' });
  parts.treeTitle = h('h2', {}, t('ui.tree'));
  parts.tree = h('div', { id: 'tree', class: 'mv-tree', tabindex: -1 }, parts.treePlot, parts.overlay, parts.outline);
  return h('section', { class: 'mv-panel mv-tree-panel', 'data-panel': 'tree', 'aria-label': t('ui.tree') },
    h('div', { class: 'mv-panel-head' }, parts.treeTitle, legend(t), h('span', { class: 'mv-showing' }, t('ui.showing_a')),
      parts.verify,
      h('label', { class: 'mv-predict', title: t('ui.predict_hint') }, parts.predict, t('ui.predict')), parts.drawer),
    parts.tree, parts.sentence);
}

function legend(t) {
  return h('div', { class: 'mv-legend' }, ...LEGEND.map((name) =>
    h('span', { title: t(`ui.legend_${name}_hint`) }, symbol(name), t(`ui.legend_${name}`))));
}

function maskPanel(parts, t) {
  parts.maskPlot = h('div', { class: 'mv-plot', role: 'group', 'aria-label': t('ui.mask') });
  parts.lens = h('div', { class: 'mv-lens', hidden: true });
  parts.mask = h('div', { id: 'mask', class: 'mv-mask', tabindex: 0, 'aria-label': t('ui.mask'), role: 'group' },
    parts.maskPlot, parts.lens);
  parts.causal = h('input', { type: 'checkbox', id: 'causal' });
  parts.causalLabel = h('label', { class: 'mv-predict' }, parts.causal, t('ui.causal'));
  parts.cacheCells = h('div', { class: 'mv-cells' });
  parts.cacheText = h('p', { class: 'mv-cache-text' });
  parts.cache = h('div', { id: 'cache', class: 'mv-cache', role: 'group', 'aria-label': t('ui.cache') },
    parts.cacheCells, parts.cacheText);
  return h('section', { class: 'mv-panel mv-mask-panel', 'data-panel': 'mask', 'aria-label': t('ui.mask') },
    h('div', { class: 'mv-panel-head' }, h('h2', {}, t('ui.mask')), h('span', { class: 'mv-axis-note' }, t('ui.mask_note')),
      parts.causalLabel),
    parts.mask, parts.cache);
}

function tabsPanel(parts, t) {
  parts.verdict = h('div', { id: 'verdict', class: 'mv-verdict', role: 'tabpanel', tabindex: 0 });
  parts.table = h('div', { class: 'mv-table' });
  parts.heads = h('div', { id: 'heads-table', class: 'mv-heads', role: 'tabpanel', tabindex: 0 }, parts.table);
  parts.gains = h('div', { id: 'gains', class: 'mv-verdict', role: 'tabpanel', tabindex: 0, 'aria-labelledby': 'tab-gains' });
  parts.tabs = ['verdict', 'heads', 'gains'].map((name) => h('button',
    { role: 'tab', id: `tab-${name}`, 'data-tab': name, 'aria-selected': 'false' }, t(`ui.tab_${name}`)));
  parts.verdict.setAttribute('aria-labelledby', 'tab-verdict');
  parts.heads.setAttribute('aria-labelledby', 'tab-heads');
  return h('section', { class: 'mv-panel mv-tabs-panel', 'data-panel': 'verdict', 'aria-label': t('ui.panels') },
    h('div', { class: 'mv-tabs', role: 'tablist' }, ...parts.tabs), parts.verdict, parts.heads, parts.gains);
}

function sliderStrip(parts, t) {
  parts.slider = h('input', { type: 'range', min: 0, max: 0, step: 1, value: 0, 'aria-label': t('ui.step_slider') });
  parts.dots = h('div', { class: 'mv-dots', 'aria-hidden': 'true' });
  parts.stepCount = h('span', { class: 'mv-step-count' });
  return h('section', { id: 'step-slider', class: 'mv-slider', 'aria-label': t('ui.step_slider') },
    h('div', { class: 'mv-rail' }, parts.dots, parts.slider), parts.stepCount);
}

function helpDialog(parts, t) {
  const keys = ['arrows', 'home', 'end', 'space', 'comma', 'pin', 'show', 'escape', 'mouse'];
  parts.dialog = h('dialog', { class: 'mv-dialog', 'aria-label': t('ui.help') },
    h('h2', {}, t('ui.help')),
    h('dl', {}, ...keys.flatMap((key) => [h('dt', {}, t(`ui.key_${key}`)), h('dd', {}, t(`ui.key_${key}_does`))])),
    h('p', {}, t('ui.help_note')),
    h('form', { method: 'dialog' }, h('button', { class: 'mv-action' }, t('ui.close'))));
  return parts.dialog;
}
