"""The interface of features: modules, commands, RPC, services, settings. `peer.features` lists the features."""
