"""Tables of the AMP and Galvatron-BMW papers, rebuilt from data sheets and compared with the published figures."""
