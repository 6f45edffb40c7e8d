"""Deployment of one model over unlike devices: which layers on which device, in which order (UELLM, section 4.3).

Pure: a topology and a model in, device maps out. `topology` reads the devices and links, `stages` turns them into times and capacities,
`objective` is what `exact` and `beam` minimise, `deployers` are the policies, `plan` is the result and the flags of vLLM, `probe` reads
`nvidia-smi`.
"""
