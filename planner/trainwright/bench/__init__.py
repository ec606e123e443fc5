"""The tables of AMP and of Galvatron-BMW, rebuilt from data sheets beside what the papers print."""
