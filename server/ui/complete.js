/* Mode "Complete": a prompt in, its continuation out. */

export function mount() {}
