"""What tests are made of: models, texts, samples, policies, runs. No test stands here."""
