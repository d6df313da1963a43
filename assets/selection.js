// One selection for tree, outline, mask, table, cache and text. It is kept by path, so it survives redraws.

const HOVER_MS = 80;
const NOTHING = { row: 0, path: '', parent: -1, depth: 0, rank: 0, text: '', verdict: 'root', x: null, y: null, p: null };

export class Selection {
  constructor(root) {
    this.root = root;
    this.path = '';
    this.preview = null;
    this.bind([]);
  }

  // New nodes: the selected path stays, or moves up to the nearest node that still exists.
  bind(drawn) {
    const nodes = drawn.length ? drawn : [NOTHING];
    this.nodes = new Map(nodes.map((node) => [node.row, node]));
    this.byPath = new Map(nodes.map((node) => [node.path, node]));
    this.children = new Map(nodes.map((node) => [node.row, []]));
    for (const node of nodes) this.children.get(node.parent)?.push(node);
    while (!this.byPath.has(this.path)) this.path = parentPath(this.path);
    this.preview = null;
  }

  get node() {
    return this.byPath.get(this.path);
  }

  get row() {
    return this.node.row;
  }

  // The node shown in the panels: the hovered one while there is one.
  get shown() {
    return this.nodes.get(this.preview ?? this.row) ?? this.node;
  }

  select(row) {
    const node = this.nodes.get(row);
    if (!node) return;
    clearTimeout(this.timer);
    this.path = node.path;
    this.preview = null;
    this.emit();
  }

  // Up to the nearest node that is drawn: what was selected has been folded away.
  rise() {
    while (this.node.x === null && this.path !== '') this.path = parentPath(this.path);
  }

  selectPath(path) {
    if (this.byPath.has(path)) this.select(this.byPath.get(path).row);
  }

  // Hover; a short delay keeps a mouse that only passes through from flickering the panels.
  hover(row) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const preview = this.nodes.has(row) ? row : null;
      if (preview === this.preview) return;
      this.preview = preview;
      this.emit();
    }, HOVER_MS);
  }

  emit() {
    this.root.dispatchEvent(new CustomEvent('mv:select', { detail: { row: this.row, preview: this.preview } }));
  }

  // Nodes of the same head and rank: what that head proposed there, whatever the heads before it chose.
  same({ depth, rank }) {
    return depth === 0 ? [] : [...this.nodes.values()].filter((node) => node.depth === depth && node.rank === rank);
  }

  // Rows from the root to `row`, root first.
  ancestors(row) {
    const rows = [];
    for (let node = this.nodes.get(row); node; node = this.nodes.get(node.parent)) rows.unshift(node.row);
    return rows;
  }

  // Arrow keys, Home and End. `mode` is "tree" (parent, child, sibling) or "rows" (up and down the mask's rows).
  move(key, mode = 'tree') {
    const target = { ...this.treeMoves(), ...(mode === 'rows' ? this.rowMoves() : {}) }[key];
    if (!target) return false;
    const node = target();
    if (node) this.select(node.row);
    return true;
  }

  treeMoves() {
    const { node } = this;
    return {
      ArrowLeft: () => this.nodes.get(node.parent),
      ArrowRight: () => this.children.get(node.row)[0],
      ArrowUp: () => this.neighbour(-1),
      ArrowDown: () => this.neighbour(1),
      Home: () => this.nodes.get(0),
      End: () => this.acceptedLeaf(),
    };
  }

  rowMoves() {
    return {
      ArrowUp: () => this.nodes.get(this.row - 1),
      ArrowDown: () => this.nodes.get(this.row + 1),
    };
  }

  // The next node of the same depth: siblings first, since rows are ordered by depth, then path.
  neighbour(offset) {
    const other = this.nodes.get(this.row + offset);
    return other && other.depth === this.node.depth ? other : null;
  }

  acceptedLeaf() {
    let leaf = this.nodes.get(0);
    for (const node of this.nodes.values()) {
      if (['accepted', 'cut'].includes(node.verdict) && node.depth > leaf.depth) leaf = node;
    }
    return leaf;
  }
}

export function parentPath(path) {
  const cut = path.lastIndexOf('.');
  return cut < 0 ? '' : path.slice(0, cut);
}
