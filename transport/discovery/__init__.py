"""Peer discovery: signed peer records, the address book, mDNS, UPnP, dial-backs."""
