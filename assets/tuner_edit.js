// What a key or a click does to a node of the tree.

// [action, payload] or null. A node of the tree is pruned; a slot gets a node; + adds one below.
export function nodeAction(node, key) {
  const own = node.own || node.row === 0;
  if (key === '+' && own) return ['add', { path: node.path, below: true }];
  if (node.row === 0) return null;
  if (['Delete', 'Backspace'].includes(key) && own) return ['prune', { path: node.path }];
  if (key === 'Enter') return [own ? 'prune' : 'add', { path: node.path }];
  return null;
}
