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
        float value = tensor.value[at], gradient = tensor.gradient[at] * scale;
        gradient = gradient < -rule.limit ? -rule.limit : gradient;
        gradient = gradient > rule.limit ? rule.limit : gradient;
        gradient += rule.weight_decay * value;
        if (rule.kind == ADAM) {
            float one = tensor.first[at], two = tensor.second[at];
            one += (1.0f - rule.beta1) * (gradient - one);
            two = rule.beta2 * two + (1.0f - rule.beta2) * gradient * gradient;
            tensor.first[at] = one;
            tensor.second[at] = two;
            float denominator = sqrtf(two) * (1.0f / rule.correction2_root) + rule.epsilon;
            value = value * rule.shrink - rule.rate / rule.correction1 * (one / denominator);
        } else if (rule.kind == ADAGRAD) {
            float sum = tensor.first[at] + gradient * gradient;
            tensor.first[at] = sum;
            value = value * rule.shrink - rule.rate * (gradient / (sqrtf(sum) + rule.epsilon));
        } else {
            float moved = gradient;
            if (tensor.first) {
                float past = rule.momentum * tensor.first[at] + gradient;
                tensor.first[at] = past;
                moved = rule.nesterov ? gradient + rule.momentum * past : past;
            }
            value = value * rule.shrink - rule.rate * moved;
        }
        tensor.value[at] = value;
    }
}
