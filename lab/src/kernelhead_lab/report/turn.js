const place = document.getElementById('{plot_id}');
const scenes = Object.keys(place.layout).filter((name) => name.startsWith('scene'));
let turning = false;
place.on('plotly_relayouting', (changes) => {
  const moved = Object.keys(changes).find((name) => name.endsWith('.camera'));
  if (turning || !moved) return;
  turning = true;
  const others = scenes.filter((name) => !moved.startsWith(name + '.'));
  const turned = Object.fromEntries(others.map((name) => [name + '.camera', changes[moved]]));
  Plotly.relayout(place, turned).then(() => { turning = false; });
});
