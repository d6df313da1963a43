// The Explorer page: everything on it is drawn from one view, which the session answers to every action.

import { frame, translator } from './dom.js';
import { createCompare } from './compare.js';
import { createControls, drawStatus, playback } from './controls.js';
import { createExports } from './exports.js';
import { createGains } from './gains.js';
import { createKnobs } from './knobs.js';
import { buildLayout } from './layout.js';
import { Link } from './link.js';
import { createModelMenu } from './model_menu.js';
import { Motion } from './motion.js';
import { createOutline } from './outline.js';
import { createCache, createHeads, createMerits, createVerdict } from './panels.js';
import { createMask, createTree, unpacked } from './figures.js';
import { Screen } from './screen.js';
import { parentPath, Selection } from './selection.js';
import { createText } from './text.js';
import { Tooltip } from './tooltip.js';
import { installPages } from './pages.js';
import { installKeys, installTabs, installTheme } from './shell.js';

const PROPOSED = 1;
const ARRIVAL = 3;
const SAID_MS = 6000;
const KEEPS_PHASE = ['knob', 'preset', 'poll', 'verify', 'open', 'fold', 'screen', 'pin', 'unpin', 'check', 'use'];

// Builds the page inside `element`. `session` is {texts, lang, options, act(action, payload), poll(), waiting(),
// record(), written(), models(), page(name, action, payload)}; without `page` there is only the Explorer, without `models`
// the model cannot be changed.
export function mount(element, session) {
  const app = createApp(element, session);
  installTheme(app);
  installTabs(app);
  installKeys(app);
  installPages(app);
  app.root.addEventListener('mv:select', () => select(app));
  app.act('hello');
  app.screen.report(app);
  return { destroy: () => app.link.close() };
}

function createApp(element, session) {
  const t = translator(session.texts);
  element.lang = document.documentElement.lang = session.lang;
  const parts = buildLayout(element, t, session.options.longest_prompt);
  const app = {
    root: element, parts, t, session, options: session.options, view: null, phase: ARRIVAL, playing: null,
    screen: new Screen(element), tip: new Tooltip(element), selection: new Selection(element),
  };
  Object.assign(app, playback(app));
  app.link = new Link(session, {
    onView: (view, job) => show(app, unpacked(view), job),
    onWaiting: (n) => { if (n > 0) app.say(t('ui.waiting', { n })); },
    onError: () => lost(app),
    onBusy: (busy) => { element.dataset.busy = String(busy); },
    merged: ['knob', 'goto'], pollAfter,
  });
  app.act = (action, payload) => app.link.act(action, payload);
  app.say = (sentence) => say(app, sentence);
  app.predict = () => parts.predict.checked;
  app.setPhase = (phase) => setPhase(app, phase);
  app.tree = createTree(app);
  app.mask = createMask(app);
  app.motion = new Motion(parts, app.tree.plot);
  app.knobs = createKnobs(app);
  app.outline = createOutline(app);
  app.tabPanels = [whenOpen(parts.verdict, createVerdict(app)), whenOpen(parts.heads, createHeads(app)),
    whenOpen(parts.gains, createGains(app))];
  app.panels = [createText(app), createControls(app), ...app.tabPanels, createCache(app), createMerits(app), app.knobs,
    createCompare(app), createExports(app), createModelMenu(app), app.mask];
  return app;
}

// Something is still coming by itself: the model, the comparison with greedy, a place in the queue; or the server waits
// for the page to stand still.
function pollAfter(view) {
  if (view.status.loading) return 400;
  if (view.equality.state === 'waiting' && !view.run.recorded && view.steps.count) return 250;
  if (view.equality.plain_due) return 250;
  return view.status.notice ? 1500 : 0;
}

// A panel behind another tab is drawn when its tab is opened.
function whenOpen(element, panel) {
  const own = (name) => (...values) => { if (!element.hidden) panel[name]?.(...values); };
  return { draw: own('draw'), select: own('select'), phase: own('phase') };
}

// What the page itself has to say stands in the status line for a while, or until the next action.
function say(app, sentence) {
  clearTimeout(app.saidTimer);
  app.said = sentence;
  if (app.view) drawStatus(app, app.view.status, app.view.run);
  if (sentence) app.saidTimer = setTimeout(() => say(app, ''), SAID_MS);
}

// The last good step stays; only the status line changes.
function lost(app) {
  app.said = '';
  const { title } = app.view?.status ?? { title: '' };
  const status = { state: 'error', text: app.t('ui.lost'), notice: '', title, fraction: null, loading: false };
  drawStatus(app, status, app.view?.run ?? { banner: '' });
}

// Draws a view. Data attributes and panels change at once; only the tree's figure may follow a motion.
async function show(app, view, job) {
  const before = app.view;
  app.view = view;
  if (!['poll', 'screen'].includes(job.action)) app.said = app.guessed = '';
  drawStatus(app, view.status, view.run);
  if (!KEEPS_PHASE.includes(job.action)) app.phase = app.predict() ? PROPOSED : ARRIVAL;
  app.root.dataset.phase = app.phase;
  app.tip.hide();
  app.selection.bind(view.tree.nodes);
  if (job.action === 'fold') app.selection.rise();
  else if (job.action !== 'open') unfold(app);
  // The tree comes first on a wide screen; there the outline is only read, and follows it.
  if (app.screen.phone) app.outline.draw();
  for (const panel of app.panels) panel.draw(view);
  describe(app);
  mark(app);
  await drawTree(app, before, job);
  const ms = performance.now() - job.at;
  if (job.action !== 'poll') app.root.dataset.repaint = ms.toFixed(0);
  if (!app.screen.phone) app.outline.draw();
  app.knobs.measured(view, ['knob', 'preset'].includes(job.action) ? ms : null);
  mark(app);
}

// A step forward moves; news that arrive by themselves leave a motion alone, since it ends with the newest view.
async function drawTree(app, before, job) {
  if (job.action === 'step' && app.phase === ARRIVAL && app.motion.wanted(before, app.view, app.period())) {
    app.motion.reveal(before, app.view, (phase = app.phase) => app.tree.draw(phase), 0.8 * app.period());
  } else if (job.action !== 'poll' || !app.motion.running) {
    app.motion.skip();
    await app.tree.draw(app.phase);
  }
  await frame();
}

function setPhase(app, phase) {
  if (!app.view || phase === app.phase) return;
  app.motion.skip();
  const told = app.predict() && app.phase < ARRIVAL && phase >= ARRIVAL && app.selection.path !== '';
  app.phase = phase;
  app.guessed = told ? guess(app) : '';
  phaseChanged(app);
  mark(app);
  describe(app);
  app.tree.draw(phase);
}

function phaseChanged(app) {
  app.root.dataset.phase = app.phase;
  for (const panel of [...app.panels, app.outline]) panel.phase?.();
}

function select(app) {
  if (!app.view) return;
  unfold(app);
  for (const panel of [...app.panels, app.outline, app.tree]) panel.select?.();
  app.guessed = '';
  describe(app);
  mark(app);
}

// The selected node is always drawn, whatever the tree folds.
function unfold({ selection: { node }, act }) {
  if (node.depth > 0 && node.x === null) act('open', { path: parentPath(node.path) });
}

// One sentence on the shown node, or on what was guessed until another node or step is looked at; before the backbone
// was asked there is nothing to say of a draft.
function describe({ view, phase, selection, parts, t, guessed }) {
  const { row } = selection.shown;
  const known = phase > PROPOSED || row === 0;
  parts.sentence.textContent = guessed || (known ? view.rows[String(row)]?.sentence ?? '' : t('ui.verdict_later'));
}

// "Predict first": how far the path that was selected before the verdict came true.
function guess({ selection, t }) {
  const path = selection.ancestors(selection.row).slice(1).map((row) => selection.nodes.get(row));
  const hits = path.filter((node) => ['accepted', 'cut'].includes(node.verdict)).length;
  return t('ui.guess', { hits, n: path.length });
}

// What is drawn, as attributes: for tests, and for whoever scripts the page.
function mark(app) {
  const { view, selection, parts } = app;
  const step = view.steps.count ? view.steps.index : -1;
  const nodes = Math.max(0, view.tree.nodes.length - 1);
  const data = { step, nodes, node: selection.row, row: selection.row,
    path: selection.path, phase: app.phase, stamp: view.stamp };
  const elements = [app.root, parts.tree, app.tree.plot.plot, parts.mask, app.mask.plot.plot, parts.cache, parts.cacheCells,
    parts.heads, parts.table];
  for (const element of elements) Object.assign(element.dataset, data);
}
