int rloo_nothing_yet;
