// What every kernel file starts with.
typedef unsigned int u32;
typedef unsigned long long u64;

static const u64 GOLDEN = 0x9e3779b97f4a7c15ull;
#define FULL 0xffffffffu

__device__ __forceinline__ u64 mix(u64 value) {
    u64 z = value + GOLDEN;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// The value at a place of the stream that a key names: esker_types::random::Key::at.
__device__ __forceinline__ u64 value_at(u64 key, u64 index) { return mix(key + index * GOLDEN); }

// esker_nn::Dropout; a threshold of 0 drops nothing.
struct Dropout {
    u64 key;
    u32 threshold;
    float scale;
};

__device__ __forceinline__ float drop_factor(Dropout dropout, u64 row, u32 column, u32 columns) {
    if (dropout.threshold == 0) return 1.0f;
    u64 tiles = (columns + 31) / 32;
    u64 bits = value_at(dropout.key, (row * tiles + column / 32) * 8 + column % 8);
    u32 lane = (u32)(bits >> (column % 32 / 8 * 16)) & 0xffff;
    return lane < dropout.threshold ? 0.0f : dropout.scale;
}

// V numbers that are loaded and stored at once.
template <int V> struct Pack {
    float x[V];
};

template <int V> __device__ __forceinline__ Pack<V> load(const float* from);
template <> __device__ __forceinline__ Pack<4> load<4>(const float* from) {
    float4 v = __ldg((const float4*)from);
    return Pack<4>{{v.x, v.y, v.z, v.w}};
}
template <> __device__ __forceinline__ Pack<1> load<1>(const float* from) { return Pack<1>{{__ldg(from)}}; }

// The same for memory that this kernel also writes.
template <int V> __device__ __forceinline__ Pack<V> load_own(const float* from) {
    Pack<V> found;
#pragma unroll
    for (int v = 0; v < V; v++) found.x[v] = from[v];
    return found;
}

template <int V> __device__ __forceinline__ void store(float* to, Pack<V> pack);
template <> __device__ __forceinline__ void store<4>(float* to, Pack<4> pack) {
    *(float4*)to = make_float4(pack.x[0], pack.x[1], pack.x[2], pack.x[3]);
}
template <> __device__ __forceinline__ void store<1>(float* to, Pack<1> pack) { *to = pack.x[0]; }

// Sum over a group of neighbouring lanes, the same in each; the order is fixed.
template <int G> __device__ __forceinline__ float group_sum(float value) {
    for (int distance = G / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(FULL, value, distance, 32);
    return value;
}

// G lanes a row, T packs of V columns a lane: every shape that rows are read in. Columns beyond the first
// G * T * V are the work of further blocks.
#define FOR_SHAPES(KERNEL) \
    KERNEL(32, 4, 4) KERNEL(32, 2, 4) KERNEL(32, 1, 4) KERNEL(16, 1, 4) KERNEL(8, 1, 4) KERNEL(4, 1, 4) \
    KERNEL(2, 1, 4) KERNEL(1, 1, 4) KERNEL(32, 4, 1) KERNEL(8, 1, 1)

typedef unsigned short u16;

// What stored bits are as f32, to the bit as esker_fetch::RowFormat::convert has it.
struct Single {
    typedef u32 Bits;
    static const bool scaled = false;
    static __device__ __forceinline__ float value(u32 bits) { return __uint_as_float(bits); }
};

struct Half {
    typedef u16 Bits;
    static const bool scaled = false;
    static __device__ __forceinline__ float value(u32 bits) {
        u32 sign = (bits & 0x8000u) << 16, size = bits & 0x7fffu;
        // The exponent of f32 is 112 larger; numbers below the normal ones are made right by the multiplication as well, exactly.
        u32 finite = __float_as_uint(__uint_as_float(size << 13) * 0x1p112f);
        // NaNs are marked quiet and keeps the rest of its bits.
        u32 other = 0x7f800000u | (size & 0x3ffu) << 13 | (size > 0x7c00u ? 0x400000u : 0u);
        return __uint_as_float(sign | (size < 0x7c00u ? finite : other));
    }
};
