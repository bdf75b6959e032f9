// Optimizer steps by PyTorch's formulas, over all parameters at once.

static const u32 MOST_TENSORS = 48, NUMBERS_EACH = 1024;

struct Tensor {
    float* value;
    const float* gradient;
    float* first;
    float* second;
    u32 count;
    u32 first_block;
};

struct Tensors {
    Tensor tensor[MOST_TENSORS];
    u32 count;
};

enum { SGD = 0, ADAM = 1, ADAGRAD = 2 };

struct Rule {
    u32 kind;
    u32 nesterov;
    float momentum;
    float beta1;
    float beta2;
    float epsilon;
    float correction1;
    float correction2_root;
    float rate;
    float limit;
    float weight_decay;
    float shrink;
    float clip_norm;
};

__device__ __forceinline__ Tensor tensor_of(const Tensors& tensors, u32 block) {
    u32 found = 0;
    for (u32 at = 1; at < tensors.count; at++)
        if (tensors.tensor[at].first_block <= block) found = at;
    return tensors.tensor[found];
}

// Squares of a block's gradients; `block_offset` is where this launch's blocks start in `sums`.
extern "C" __global__ void __launch_bounds__(256) squares(Tensors tensors, double* sums, u32 block_offset) {
    __shared__ double parts[256];
    Tensor tensor = tensor_of(tensors, blockIdx.x);
    u32 first = (blockIdx.x - tensor.first_block) * NUMBERS_EACH;
    double sum = 0.0;
    for (u32 at = first + threadIdx.x; at < min(first + NUMBERS_EACH, tensor.count); at += 256)
        sum += (double)tensor.gradient[at] * (double)tensor.gradient[at];
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0.0;
        for (u32 at = 0; at < 256; at++) sum += parts[at];
        sums[block_offset + blockIdx.x] = sum;
    }
}

// One number by the rule; `first` and `second` are the states that it has.
__device__ __forceinline__ float moved_value(const Rule& rule, float value, float gradient, float* first, float* second) {
    gradient = gradient < -rule.limit ? -rule.limit : gradient;
    gradient = gradient > rule.limit ? rule.limit : gradient;
    gradient += rule.weight_decay * value;
    if (rule.kind == ADAM) {
        float one = *first, two = *second;
        one += (1.0f - rule.beta1) * (gradient - one);
        two = rule.beta2 * two + (1.0f - rule.beta2) * gradient * gradient;
        *first = one;
        *second = two;
        float denominator = sqrtf(two) * (1.0f / rule.correction2_root) + rule.epsilon;
        return value * rule.shrink - rule.rate / rule.correction1 * (one / denominator);
    }
    if (rule.kind == ADAGRAD) {
        float sum = *first + gradient * gradient;
        *first = sum;
        return value * rule.shrink - rule.rate * (gradient / (sqrtf(sum) + rule.epsilon));
    }
    float moved = gradient;
    if (first) {
        float past = rule.momentum * *first + gradient;
        *first = past;
        moved = rule.nesterov ? gradient + rule.momentum * past : past;
    }
    return value * rule.shrink - rule.rate * moved;
}

// Moves parameters. `length` is the length of all gradients, where they are clipped by it; nothing moves when it is no
// number.
extern "C" __global__ void __launch_bounds__(256) update(Tensors tensors, Rule rule, const double* length) {
    Tensor tensor = tensor_of(tensors, blockIdx.x);
    float scale = 1.0f;
    if (length) {
        double found = *length;
        if (!isfinite(found)) return;
        scale = (float)fmin((double)rule.clip_norm / (found + 1e-6), 1.0);
    }
    u32 first = (blockIdx.x - tensor.first_block) * NUMBERS_EACH;
    for (u32 at = first + threadIdx.x; at < min(first + NUMBERS_EACH, tensor.count); at += 256) {
        float *first_state = tensor.first ? tensor.first + at : nullptr, *second_state = tensor.second + at;
        tensor.value[at] = moved_value(rule, tensor.value[at], tensor.gradient[at] * scale, first_state, second_state);
    }
}

// Moves some rows of a table; rows do not repeat. A thread a number.
extern "C" __global__ void __launch_bounds__(256) update_rows(
    float* table, const float* gradient, float* first, float* second, const u32* rows, u64 count, u32 columns, Rule rule
) {
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= count) return;
    u64 place = (u64)rows[at / columns] * columns + at % columns;
    table[place] = moved_value(rule, table[place], gradient[at], first ? first + place : nullptr, second + place);
}
