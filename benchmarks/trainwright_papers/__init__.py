"""Tables of the AMP, Galvatron-BMW and Alpa papers, rebuilt from data sheets and compared with what is published."""
