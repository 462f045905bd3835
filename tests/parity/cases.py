"""The runs that are compared with PyTorch: settings as they stand in a config file, and the token stream."""

SEED, TOKENS = 20, 640
SAMPLES = 24  # elements of a tensor that are compared one by one

COMMON = {
    "model.layers": 2, "model.vocab": 101, "model.seq_len": 24,
    "train.steps": 10, "train.micro_batch": 2, "train.global_batch": 6, "train.seed": 17, "train.init_std": 0.05,
    "optimizer.kind": "adamw", "optimizer.lr": 4e-3, "optimizer.min_lr": 4e-4, "optimizer.warmup_steps": 3,
    "optimizer.decay": "cosine", "optimizer.beta1": 0.9, "optimizer.beta2": 0.95, "optimizer.eps": 1e-8,
    "optimizer.weight_decay": 0.1, "optimizer.clip": 1.8,
    "model.norm_eps": 1e-5, "data.mask_documents": "no",
}
GPT = {**COMMON, "model.arch": "gpt", "model.hidden": 64, "model.heads": 4, "model.kv_heads": 4, "model.ffn": 256,
       "model.tie_embeddings": "yes"}
LLAMA = {**COMMON, "model.arch": "llama", "model.hidden": 96, "model.heads": 6, "model.kv_heads": 2,
         "model.ffn": 160, "optimizer.clip": 2.7, "model.rope_theta": 10000.0, "model.tie_embeddings": "no"}

CASES = {
    "gpt_tied": GPT,
    "gpt_untied_grouped": {**GPT, "model.hidden": 96, "model.heads": 6, "model.kv_heads": 2, "model.ffn": 200,
                           "model.tie_embeddings": "no", "optimizer.clip": 2.5},
    "gpt_masked": {**GPT, "data.mask_documents": "yes"},
    "llama_untied": LLAMA,
    "llama_tied_grouped": {**LLAMA, "model.kv_heads": 3, "model.tie_embeddings": "yes", "model.rope_theta": 500.0},
    "llama_masked": {**LLAMA, "data.mask_documents": "yes", "train.micro_batch": 1},
    "llama_sgd": {**LLAMA, "optimizer.kind": "sgd", "optimizer.lr": 0.3, "optimizer.min_lr": 0.03,
                  "optimizer.weight_decay": 1e-3},
}


def corpus():
    """Tokens and document lengths: runs of arithmetic progressions modulo the vocabulary, some of one token.
    A linear congruential generator of its own (Knuth's MMIX constants), the same on every Python."""
    state, tokens, documents = SEED, [], []

    def draw(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    while len(tokens) < TOKENS:
        length = min([1, 2, 3, 7, 16, 40, 90][draw(7)], TOKENS - len(tokens))
        start, stride = draw(101), 1 + draw(4)
        tokens += [(start + i * stride) % 101 for i in range(length)]
        documents.append(length)
    return tokens, documents


def spread(count):
    """Indices of the elements of a tensor that are compared one by one: evenly spread, in all rows and columns."""
    n = min(SAMPLES, count)
    return [int((i + 0.5) * count / n) for i in range(n)]
