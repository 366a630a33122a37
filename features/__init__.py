"""The interface of features: modules, commands, RPC, routes, pages, services, settings. `peer.features` lists the features."""
