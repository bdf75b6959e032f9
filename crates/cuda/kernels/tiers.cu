// Gathers the rows of a batch from three tiers, as they are stored, and converts them to f32 on the way: memory of the device,
// host memory read over the bus, and what the batch read. A placement per row says where (esker_plan::Placement): a slot, the
// first of which are on the device and the others in host memory; the index of a row among those that were read; or nowhere,
// and the row is zeros. Four numbers a lane where the width allows it: what is
// written is the most of the traffic and goes in packs of 16 bytes, and lanes of a row read without gaps.

typedef unsigned char u8;

struct Brain {
    typedef u16 Bits;
    static const bool scaled = false;
    static __device__ __forceinline__ float value(u32 bits) {
        return __uint_as_float((bits | ((bits & 0x7fffu) > 0x7f80u ? 0x40u : 0u)) << 16);
    }
};

struct Unsigned {
    typedef u8 Bits;
    static const bool scaled = true;
    static __device__ __forceinline__ float value(u32 bits) { return (float)bits; }
};

struct Signed {
    typedef u8 Bits;
    static const bool scaled = true;
    static __device__ __forceinline__ float value(u32 bits) { return (float)((int)(bits << 24) >> 24); }
};

// Stored numbers, one or four at once.
template <class B> __device__ __forceinline__ void load_bits(const B* from, u32 (&bits)[1]) { bits[0] = __ldg(from); }
__device__ __forceinline__ void load_bits(const u32* from, u32 (&bits)[4]) {
    uint4 four = __ldg((const uint4*)from);
    bits[0] = four.x, bits[1] = four.y, bits[2] = four.z, bits[3] = four.w;
}
__device__ __forceinline__ void load_bits(const u16* from, u32 (&bits)[4]) {
    uint2 four = __ldg((const uint2*)from);
    bits[0] = four.x & 0xffffu, bits[1] = four.x >> 16, bits[2] = four.y & 0xffffu, bits[3] = four.y >> 16;
}
__device__ __forceinline__ void load_bits(const u8* from, u32 (&bits)[4]) {
    u32 four = __ldg((const u32*)from);
    bits[0] = four & 0xffu, bits[1] = four >> 8 & 0xffu, bits[2] = four >> 16 & 0xffu, bits[3] = four >> 24;
}

// Blocks are few and go on to further rows: work on another stream finds room beside them.
template <class S, int G, int T, int V>
__device__ __forceinline__ void assemble_tiers(
    const u32* __restrict__ words, const typename S::Bits* __restrict__ device,
    const typename S::Bits* __restrict__ host, const typename S::Bits* __restrict__ missed,
    const float* __restrict__ scales, float* __restrict__ to, u32 count, u32 columns, u32 device_slots
) {
    u32 lane = threadIdx.x % G, rows = blockDim.x / G;
    u32 first = blockIdx.y * (G * T * V) + lane * V;
    for (u64 row = (u64)blockIdx.x * rows + threadIdx.x / G; row < count; row += (u64)gridDim.x * rows) {
        u32 word = __ldg(words + row);
        bool skipped = word == 0xffffffffu;
        const typename S::Bits* source = word >> 31 ? missed + (u64)(word & 0x3fffffffu) * columns
            : word < device_slots ? device + (u64)word * columns
                                  : host + (u64)(word - device_slots) * columns;
        u32 bits[T][V] = {};
#pragma unroll
        for (int t = 0; t < T; t++) {
            u32 column = first + t * G * V;
            if (column < columns && !skipped) load_bits(source + column, bits[t]);
        }
#pragma unroll
        for (int t = 0; t < T; t++) {
            u32 column = first + t * G * V;
            if (column >= columns) continue;
            Pack<V> found;
#pragma unroll
            for (int v = 0; v < V; v++) found.x[v] = S::value(bits[t][v]);
            if (S::scaled && scales) {
                Pack<V> by = load<V>(scales + column);
#pragma unroll
                for (int v = 0; v < V; v++) found.x[v] *= by.x[v];
            }
            if (skipped) found = Pack<V>{};
            store<V>(to + row * columns + column, found);
        }
    }
}

#define TIERS(NUMBER, NAME, G, T, V) \
    extern "C" __global__ void __launch_bounds__(256) NAME( \
        const u32* words, const NUMBER::Bits* device, const NUMBER::Bits* host, const NUMBER::Bits* missed, \
        const float* scales, float* to, u32 count, u32 columns, u32 device_slots \
    ) { \
        assemble_tiers<NUMBER, G, T, V>( \
            words, device, host, missed, scales, to, count, columns, device_slots \
        ); \
    }
#define TIERS_SINGLE(G, T, V) TIERS(Single, tiers_single_##G##_##T##_##V, G, T, V)
#define TIERS_HALF(G, T, V) TIERS(Half, tiers_half_##G##_##T##_##V, G, T, V)
#define TIERS_BRAIN(G, T, V) TIERS(Brain, tiers_brain_##G##_##T##_##V, G, T, V)
#define TIERS_UNSIGNED(G, T, V) TIERS(Unsigned, tiers_unsigned_##G##_##T##_##V, G, T, V)
#define TIERS_SIGNED(G, T, V) TIERS(Signed, tiers_signed_##G##_##T##_##V, G, T, V)
FOR_SHAPES(TIERS_SINGLE)
FOR_SHAPES(TIERS_HALF)
FOR_SHAPES(TIERS_BRAIN)
FOR_SHAPES(TIERS_UNSIGNED)
FOR_SHAPES(TIERS_SIGNED)

// Rows that stay, as stored: row `index` of those that were read goes to a slot, on the device or in host memory. A pair a row.
template <class T>
__device__ __forceinline__ void keep(
    const T* __restrict__ missed, const u32* __restrict__ pairs, T* device, T* host, u64 count, u32 width, u32 device_slots
) {
    for (u64 at = (u64)blockIdx.x * blockDim.x + threadIdx.x; at < count; at += (u64)gridDim.x * blockDim.x) {
        u64 row = at / width, part = at % width;
        u32 index = __ldg(pairs + 2 * row), slot = __ldg(pairs + 2 * row + 1);
        T* to = slot < device_slots ? device + (u64)slot * width : host + (u64)(slot - device_slots) * width;
        to[part] = __ldg(missed + (u64)index * width + part);
    }
}

extern "C" __global__ void __launch_bounds__(256) keep_words(
    const u32* missed, const u32* pairs, u32* device, u32* host, u64 count, u32 width, u32 device_slots
) { keep<u32>(missed, pairs, device, host, count, width, device_slots); }

extern "C" __global__ void __launch_bounds__(256) keep_bytes(
    const u8* missed, const u32* pairs, u8* device, u8* host, u64 count, u32 width, u32 device_slots
) { keep<u8>(missed, pairs, device, host, count, width, device_slots); }
