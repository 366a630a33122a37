"""How peers find each other: signed peer records, address books, mDNS, UPnP, dial-backs."""
