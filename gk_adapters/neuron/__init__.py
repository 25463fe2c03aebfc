"""The Neuron seams: what stands between gk and torch-neuronx, neuronx-distributed and the device.

None of it has run on a device. The halves that need none (model holder, meta swap, sampler) run in tests as they are;
the rest is held against stand-ins that refuse what the documents forbid. See docs/on-neuron.md.
"""
