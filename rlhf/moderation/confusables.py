"""Characters that look like Latin letters, with the Latin letters that each may stand for.

The tables are constant, because Python's version of Unicode varies. Latin letters with marks, turned or in other styles were
selected by their names in Unicode 14, letters of other scripts by their shapes. A character may have several readings: a Greek
capital iota is i or l.
"""

from __future__ import annotations

from typing import Final

ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz"
# First code points of runs of 26 letters A to Z: fullwidth, circled, parenthesized, squared, flags, and all mathematical styles.
RUNS: Final = (
    *(0xFF21, 0xFF41, 0x24B6, 0x24D0, 0x249C, 0x1F110, 0x1F130, 0x1F150, 0x1F170, 0x1F1E6),
    *range(0x1D400, 0x1D6A4, 26),
)
DIGIT_RUNS: Final = (0x2080, 0xFF10, *range(0x1D7CE, 0x1D800, 10), 0x1FBF0)  # first code points of runs of the digits 0 to 9
GREEK: Final = "ΑΒΓΔΕΖΗΘΙΚΛΜΝΞΟΠΡϴΣΤΥΦΧΨΩ∇αβγδεζηθικλμνξοπρςστυφχψω∂ϵϑϰϕϱϖ"
# first code points of the mathematical styles: each has the letters of GREEK in this order
GREEK_RUNS: Final = range(0x1D6A8, 0x1D7CA, len(GREEK))

LETTERS: Final = {
    "a": (
        "ªÀÁÂÃÄÅàáâãäåĀāĂăĄąǍǎǞǟǠǡǺǻȀȁȂȃȦȧȺɐɑɒᴀᴬᵃᶏᶐḀḁẚẠạẢảẤấẦầẨẩẪẫẬậẮắẰằẲẳẴẵẶặₐ\u212bⱥⱭⱯⱰꬰꭤаАӐӑӒӓѦѧαάἀἁἂἃἄἅἆἇ"
        "ὰᾀᾁᾂᾃᾄᾅᾆᾇᾰᾱᾲᾳᾴᾶᾷΑΆ⍺∀ꓮꓯᎪᗅ𐌀𐊠ⲀᏎᗩ卂คልᎯꍏΛ∆Δ₳λ𖽀Ддꭺꮞꭿ"
    ),
    "b": "ƀƁƂƃɃɓʙᴃᴮᵇᵬᶀḂḃḄḅḆḇℬꞖꞗꞴꞵƄƅвВьЬъЪѢѣҌҍбБβϐΒꓐᏴᏏᖯᗷᑲ𐌁𐊂ⲂⲃҔ𐊡฿乃๒ጌᏰꌃ♭Ђᗽᗾᗸᛔ␢ცɮჩᏼꮟᏸ",
    "c": "ÇçĆćĈĉĊċČčƇƈȻȼɕʗᴄᶜḈḉℂℭⅭⅽↄꜾꜿꞒꞓꞔꟄꟲ𝼏𝼝🄫сСҁҀҪҫϲϹςϾꓚᏟ⊂⊏ᑕ𐌂𐊢ⲤⲥᲡ𐐕𐐽⸦ꮯ𐔜𑣲🝌☾ㄈ匚ርᏣꉓ₵ᑢᄃ𑣩ፈꮳ",
    "d": "ÐðĎďĐđƊƋƌȡɖɗᴅᴆᴰᵈᵭᶁᶑḊḋḌḍḎḏḐḑḒḓⅅⅆⅮⅾꝹꝺꟇꟈƉԁԀδ∂ꓓᎠꓒᗞᗪᏧᑯᑻժ₫ᗫ๔ዕᎴꀷᕲᚧ◗ძꭰꮷꮄ",
    "e": (
        "ÈÉÊËèéêëĒēĔĕĖėĘęĚěƎƏƐǝȄȅȆȇȨȩɆɇɘəɚɛɜɝɞʚᴇᴈᴱᵉᶒᶓᶔᶕḔḕḖḗḘḙḚḛḜḝẸẹẺẻẼẽẾếỀềỂểỄễỆệₑₔℯℰⅇⱸⱻꞫꬲꬳꬴеЕёЁѐЀӖӗєЄэЭԐԑҽҾҿ"
        "Ҽεέϵ϶ΕΈἐἑἒἓἔἕὲηꓰᎬ∊∈⋿ⴹ𐊆З℮Ꮛꮛᗴᕮ𑢮६ξ∑Σ\u0639乇ቿꍟᘿモ∃𑢦ΞพᗱᏝꭼꮭ"
    ),
    "f": "ƑƒᵮᶂᶠḞḟℱꜰꝻꝼꞘꞙꟳꬵꟻғҒϝϜꓝᖴ𐊇ſթք𐔥𑢢𝈓ჶφ千ቻꎇ₣𝟋ẝᚩᎄ",
    "g": "ᎶꮆĜĝĞğĠġĢģƓǤǥǦǧǴǵɠɡɢʛᴳᵍᵷᵹᶃḠḡℊꝽꝾꝿꞠꞡꞬꟐꟑꬶ𝼁𝼂ԍԌցꓖᏀᏳգᧁ₲ງ\ufeeeኗꁅ❡ᘜᏩƍ\u05e4ꮐᏻꮹ",
    "h": "ℏΉἨἩĤĥĦħȞȟɥɦɧʜʮʯʰᴴḢḣḤḥḦḧḨḩḪḫẖₕℋℌℍℎⱧⱨⱵⱶꜦꜧꞍꞕꞪꟵꟶһҺнНңҢҥҤӈӇӉӊћЂђԨԩԦԧΗηհիᎻᏂꓧᕼ𐋏ⲎⲏዙᏥ廾ዘꃅ卄ん♄Ћꮋꮒꮵ",
    "i": (
        "ÌÍÎÏìíîïĨĩĪīĬĭĮįİƖƗǏǐȈȉȊȋɨɩɪᴉᴵᵢᵻᵼᶖḬḭḮḯỈỉỊịⁱℐℑℹⅈⅠⅰꞮ𝼚ꟾꟷіІїЇӏӀιίϊΐἰἱἲἳἴἵἶἷὶῐῑῒῖῗΙΊΪꓲᎥᎨ⍳Ⲓⲓ\u05d5՛ӥᛁ𐌉𐊊\u05df"
        "\ufe8d\u0627\ufe8e\u0661۱ⵏꙇ∣ͺ𝚤ı丨เጎꀤ♗ᓰ工エꭵꭸ"
    ),
    "j": "ĴĵǰȷɈɉɟʄʝʲᴊᴶⅉⱼꞲјЈϳͿꓙᎫյᒍ𝚥ﾌጋꀭᒚ♪丿ჟ\u05e0ℑᶖꭻ",
    "k": "ĶķĸƘƙǨǩʞᴋᴷᵏᶄḰḱḲḳḴḵₖ\u212aⱩⱪꝀꝁꝂꝃꝄꝅꞢꞣꞰ𝼃𝼐кКќЌқҚҝҜҟҞҡҠӃӄԞԟκϰΚꓗᏦⲔⲕᛕᗞ𐌊𐔘ጕꀘズ₭ꮶ",
    "l": (
        "ĹĺĻļĽľĿŀŁłƚȴȽɫɬɭʟˡᴌᴸᶅḶḷḸḹḺḻḼḽₗℒℓⅬⅼⱠⱡⱢꝈꝉꞀꞁꞎꞭꬷꬸꬹ𝼄𝼑𝼓ꝆꝇӏӀꓡᏞ\u07ca∣│\u05df\u05d5\u05d0ǀⵏ\u0627\u0661۱ⵊᒪլⳑ"
        "ΙІⅠℑℐꓲ𐊊𐌉ⲒⳐ𐐛𐔦𑢲𖼨𝈪🯱ᛁㄥレረ꒒₤ᒻ↳￨𐌠\U0001e8c7\ufe8d\ufe8e𖼖𑢣Ꮭꮮꮭ"
    ),
    "m": "ƜɯɰɱᴍᴟᴹᵐᵯᶆḾḿṀṁṂṃₘℳⅯⅿⱮꟺꬺꟽꟿмМӍӎΜꓟᎷᗰⲘⲙᛖ𐌑𐊰ϺϻՊ爪๓ጠꂵᘻ₥♏♍♔ʍლᙢꮇ",
    "n": "ӇÑñŃńŅņŇňŊŋƝƞǸǹȠȵɲɳɴᴎᴺᵰᶇṄṅṆṇṈṉṊṋⁿₙℕꞐꞑꞤꞥꬻꬼ𝼇𝼔пПԤԥлиИйЙηήἠἡἢἣἤἥἦἧὴῂῃῄῆῇΝπոռղꓠⲚⲛ∩ᑎՈ𐔓几ภክꈤᘉ₦ກ\u05d7ŉ⋒Л♫ℵ\u05d4",
    "o": (
        "ºÒÓÔÕÖØòóôõöøŌōŎŏŐőƆƟƠơǑǒǪǫǬǭǾǿȌȍȎȏȪȫȬȭȮȯȰȱɔɵɸᴏᴐᴑᴒᴓᴖᴗᴼᵒᶗṌṍṎṏṐṑṒṓỌọỎỏỐốỒồỔổỖỗỘộỚớỜờỞởỠỡỢợₒℴⱷⱺꝊꝋꝌꝍꬽꬾꬿ𝼛"
        "ʘоОөӨӧӦѳѲӪӫфФѺѻοόΟΌθΘσϴὀὁὂὃὄὅὸΦφϕօՕꓳᎤᏫⲞⲟⲐ\u05e1ഠ०੦૦௦౦೦൦๐໐၀០᠐০ဝ◯○●◌⚪⚫ⵔ𐐄𐐬𐊒𐊫𐓂𐓪∅⌀\u0665۵\u0647\u06d5\u06c1"
        "\u06be\u07c0〇ᢀⴰᱛ᧐ଠ\u0c02\u0d02ჿ𑢵𑣗ㄖ๏ዐꂦᓍტ⊙☉\u0d82୦\ufba6\ufba7\ufba8\ufba9\ufbaa\ufbab\ufbac\ufbad\ufee9"
        "\ufeea\ufeeb\ufeec\U0001ee24\U0001ee64\U0001ee84𑓐𑣈Ωꭴꮻ"
    ),
    "p": "ÞþƤƥᴘᴾᵖᵱᵽᶈṔṕṖṗₚℙⱣꝐꝑꝒꝓꝔꝕꝤꝥꝦꝧƿǷꟼрРҏҎρϱΡῤῥῬ⍴ꓑᏢⲢⲣᑭքթ𐊕ℼ卩የꉣ℘尸ᎮᎵ₱₽ᖘ\u05e7ᕵꮲꭾꮅ",
    "q": "ɊɋʠℚꝖꝗꝘꝙꞯꟴ𐞥ԛԚգզհϙϘԳዒꆰᕴᶐǭჹ૧☭ⵕợ۹",
    "r": "ŔŕŖŗŘřȐȑȒȓɌɍɹɺɻɼɽɾɿʀʁʳᴙᴚᴿᵣᵲᵳᶉṘṙṚṛṜṝṞṟℛℜℝⱤⱹꞂꞃꞦꞧꭅꭆꭉꭋꭌꭨ𝼈𝼕𝼖🄬ƦꝛгГѓЃґҐғяЯꓣᎡᏒⲄⲅᖇᏛՐրꮁ𐒴尺ዪꋪ℟☈ꭇꭈᴦ𝈖𖼵ꭱꮢꮫ",
    "s": "ŚśŜŝŞşŠšſƩȘșȿʂʃˢᵴᶊᶋᶘṠṡṢṣṤṥṦṧṨṩẛẜẝₛⱾꜱꞄꞅꞨꞩꟅꟉꟊ𝼋𝼌𝼞ƧƨꟖꟗꟘꟙʆѕЅꓢᏕᏚՏտ𐐠Ꙅꙅ𐊖𐑈丂รነꌗ₴֍ֆకƽꮪ𑣁𖼺ⴽടຣꮥ",
    "t": "ŢţŤťŦŧƫƬƭƮȚțȶȾʇʈᴛᵀᵗᵵṪṫṬṭṮṯṰṱẗₜⱦꞆꞇꞱ𝼉𝼍тТҬҭτΤꓔᎢⲦⲧ⊤⟙ե†ͳ𐊗𐊱𐌕Ћ𖼊🝨ㄒՇፕ꓄干ナテᎿᏆ₮₸☂ᖶ𑢼էꭲꮏꮖ",
    "u": (
        "ÙÚÛÜùúûüŨũŪūŬŭŮůŰűŲųƯưƱǓǔǕǖǗǘǙǚǛǜȔȕȖȗʊᴜᴝᵁᵘᵤᵾᵿᶙṲṳṴṵṶṷṸṹṺṻỤụỦủỨứỪừỬửỮữỰựꞸꞹꭎꭒɄʉцЦџЏуиИυύϋΰὐὑὒὓὔὕὖὗὺῠῡῢῦ"
        "ῧμµսՍꓴ∪⋃ᑌմպꞟ𑢸𖽂ㄩยሁꀎนᑘ☋ʋ𐓶𑣘ሀ𐓎ບ"
    ),
    "v": "ƲɅʋʌᴠᵛᵥᶌṼṽṾṿỼỽⅤⅴⱱⱴⱽꝞꝟѵѴѷѶνΥꓦᏙᏤ∨⋁ᐯ\u0667۷\u05d8ꛟ𐔝𑣀ᐺ\u05e9ꃴ✓𑜆ꮩ𝈍ⴸ𖼈𑢠ꮴ",
    "w": "ŴŵɷʍʷᴡᵂẀẁẂẃẄẅẆẇẈẉẘⱲⱳꞶꞷꟂꟃԝԜшШщЩѡѠѿѾѱωώϖψὠὡὢὣὤὥὦὧὼῲῳῴῶῷꓪᎳᏔաՎᗯພ𑜏山ฬሠꅏᘺ₩ಎᏊᏇฝพɯ𑜊𑜎ꮃ𑣯𑣦ຟധꮤꮚꮗ",
    "x": "ˣᶍẊẋẌẍₓⅩⅹꞳꭓꭔꭕꭖꭗꭘꭙхХҳҲӽӼжЖӾӿχΧϗꓫⲬⲭ×✕✖ᕁᕽ⨯╳ᚷ𐊴𐌗᙮⤫⤬ⵝ𐔧𑣬乂\u05d0ሸꊼ᙭✗✘⌘𐌢𐊐ჯ❌",
    "y": "ÝýÿŶŷŸƔƳƴȲȳɎɏɣʎʏʸẎẏẙỲỳỴỵỶỷỸỹỾỿꭚ𝼆ɤуУўЎүҮұҰӯӮӱӰӳӲчЧγυύΥΎΫῪϓϔꓬᎩᎽⲨⲩყ\u05e4\u05e2ℽ𐊲𑢤𖽃ㄚ\u05e5ሃꌩᖻჸႸ☿ᶌႯฯΨꭹꮍ",
    "z": "ŹźŻżŽžƵƶƷƺǮǯȜȝȤȥɀʐʑʒʓᴢᴣᵶᶎᶚᶻẐẑẒẓẔẕℤℨⱫⱬⱿꝢꝣꟆ𝼘ƸƹҘҙζΖꓜᏃⲌⲍᤁჀ𐋵𑣥乙չጊꁴ☡ꮓ𑢩𑣄ᗱチ",
}
LIGATURES: Final = {
    "ae": "ÆæǢǣǼǽᴁᴂ",
    "oe": "Œœɶᴔꭀꭁꭂꭢ",
    "ij": "Ĳĳ",
    "lj": "Ǉǈǉ",
    "nj": "Ǌǋǌ",
    "dz": "ǄǅǆǱǲǳʣʥ",
    "ff": "ﬀ",
    "fi": "ﬁ",
    "fl": "ﬂ",
    "ffi": "ﬃ",
    "ffl": "ﬄ",
    "st": "ﬅﬆ",
    "ss": "ßẞ🅍",
    "aa": "Ꜳꜳ",
    "ao": "Ꜵꜵ",
    "au": "㍳Ꜷꜷ",
    "av": "ꜸꜹꜺꜻ",
    "ay": "Ꜽꜽ",
    "oo": "Ꝏꝏ",
    "ou": "Ȣȣᴕ",
    "tz": "Ꜩꜩ",
    "vy": "Ꝡꝡ",
    "ll": "Ỻỻ",
    "ii": "Ⅱⅱ",
    "iii": "Ⅲⅲ",
    "iv": "Ⅳⅳ",
    "vi": "Ⅵⅵ",
    "vii": "Ⅶⅶ",
    "ix": "Ⅸⅸ",
    "xi": "Ⅺⅺ",
    "xii": "Ⅻⅻ",
    "ts": "ʦꭧ",
    "tc": "ʨ",
    "ls": "ʪ",
    "lz": "ʫ",
    "th": "ᵺ",
    "ue": "ᵫ",
    "hv": "ƕǶ",
}
# Letters that each digit may stand for in leetspeak.
DIGITS: Final = {"0": "o", "1": "il", "2": "z", "3": "e", "4": "a", "5": "s", "6": "bg", "7": "t", "8": "b", "9": "g"}
SYMBOLS: Final = {
    "@": "a",
    "$": "s",
    "!": "il",
    "|": "il",
    "+": "t",
    "€": "ec",
    "£": "le",
    "¥": "y",
    "¢": "c",
    "§": "s",
    "¡": "i",
}

# Ranges of invisible characters and of marks on other characters: combining marks, joiners, directions, selectors, fillers, tags.
INVISIBLE: Final = (
    *((0xAD, 0xAD), (0x300, 0x36F), (0x483, 0x489), (0x591, 0x5BD), (0x5BF, 0x5BF), (0x5C1, 0x5C2), (0x610, 0x61C)),
    *((0x64B, 0x65F), (0x670, 0x670), (0x6D6, 0x6ED), (0x115F, 0x1160), (0x17B4, 0x17B5), (0x180B, 0x180F), (0x1AB0, 0x1AFF)),
    *((0x1DC0, 0x1DFF), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x20D0, 0x20FF), (0x2CEF, 0x2CF1)),
    *((0x3099, 0x309A), (0x3164, 0x3164), (0xA66F, 0xA67D), (0xFE00, 0xFE0F), (0xFE20, 0xFE2F), (0xFEFF, 0xFEFF)),
    *(
        (0x600, 0x605),
        (0x70F, 0x70F),
        (0x7EB, 0x7F3),
        (0x890, 0x891),
        (0x8E2, 0x8E2),
        (0xC00, 0xC00),
        (0xC04, 0xC04),
    ),
    *((0xD00, 0xD00), (0x135D, 0x135F), (0x1A7F, 0x1A7F), (0x1B6B, 0x1B73), (0x2DE0, 0x2DFF), (0xA69E, 0xA69F), (0xA6F0, 0xA6F1)),
    *((0xA8E0, 0xA8F1), (0x101FD, 0x101FD), (0x10376, 0x1037A), (0x10EAB, 0x10EAC), (0x10F46, 0x10F50), (0x10F82, 0x10F85)),
    *((0x110BD, 0x110BD), (0x110CD, 0x110CD), (0x11300, 0x11300), (0x1133B, 0x1133B), (0x11366, 0x11374), (0x13430, 0x1343F)),
    *((0x16AF0, 0x16AF4), (0x1CF00, 0x1CF41), (0x1D185, 0x1D18B), (0x1D1AA, 0x1D1AD), (0x1D242, 0x1D244), (0x1E000, 0x1E02A)),
    *((0x1E8D0, 0x1E8D6),),
    *((0xFFA0, 0xFFA0), (0xFFF9, 0xFFFC), (0x1BCA0, 0x1BCA3), (0x1D165, 0x1D169), (0x1D16D, 0x1D182), (0xE0000, 0xE0FFF)),
)
SPACES: Final = (
    "\t\n\v\f\r \x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u2800\u3000"
)
# Ranges of punctuation and pictures that do not look like letters. A character in no table counts as a letter that no entry
# contains.
MARKS: Final = (
    *((0x00, 0x7F), (0x80, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7), (0x2B0, 0x2FF), (0x55A, 0x55F), (0x589, 0x58A), (0x5BE, 0x5C7)),
    *((0x600, 0x60F), (0x61B, 0x61F), (0x66A, 0x66D), (0x6D4, 0x6D4), (0x964, 0x965), (0x2010, 0x205E), (0x207A, 0x207E)),
    *((0x208A, 0x208E), (0x20A0, 0x20CF), (0x2100, 0x2BFF), (0x2E00, 0x2E7F), (0x3000, 0x303F), (0x30FB, 0x30FB)),
    *((0xA700, 0xA721), (0xA788, 0xA78A), (0xFE10, 0xFE1F), (0xFE30, 0xFE6F), (0xFF00, 0xFFEF), (0x1F000, 0x1FAFF)),
)

# English words of up to four letters. `an us` consists of two such words, so it is not a split word. `id iot` is a split word,
# because `iot` is no English word.
SHORT_WORDS: Final = """
a i o am an as at be by do ed ex go ha he hi if in is it me my no of oh ok on or ox pa pi re so to up us we act add age ago
aid aim air all and any are arm art ask ate bad bag bar bat bed bee bet big bit box boy bus but buy bye can cap car cat cop
cow cry cup cut dad day did die dig dog dot dry due ear eat egg end era eye fan far fat few fit fix fly for fox fun gas get
god got gun guy had ham has hat hen her hey hid him hip his hit hot how ice ill ink its jam jet job joy key kid lab law lay
led leg let lie lip lit log lot low mad man map may men met mix mob mom mud nor not now nut odd off oil old one our out owe
own pad pan pat pay pen pet pie pig pin pit pop pot put ran raw red rid rim rip rob rod rot row rub run sad sat saw say sea
see set sex she shy sin sip sir sit six ski sky son spy sum sun tax tea ten the tie tin tip toe ton too top toy try two use
van via war was wax way web wet who why win won yes yet you zip able army away baby back ball band bank base bath bear beat
been bell best bill bird blow blue boat body bone book born both bowl busy call calm came camp card care case cash cell chat
city club coal coat cold come cook cool copy cost crew date dead deal dear debt deep desk dirt dish does done door down draw
drop drug duty each earn east easy edge else even ever face fact fail fair fall farm fast fear feel feet fell felt file fill
film find fine fire firm fish five flat flow folk food foot form four free from fuel full fund gain game gate gave gift girl
give glad goal goes gold gone good gray grew grow hair half hall hand hang hard harm hate have head hear heat held help here
hero high hill hold hole holy home hope host hour huge hung idea inch into iron item join joke jump just keep kept kick kill
kind king knee knew know lack lady laid lake land lane last late lead left less life lift like line list live load loan lock
long look lord lose loss lost loud love luck made mail main make male many mark mass meal mean meat meet mere mile milk mind
mine miss mood moon more most move much must name near neck need news next nice nine none nose note okay once only onto open
over pace pack page paid pain pair pale park part pass past path peak pick pile plan play plus poem poet pool poor port post
pull pure push race rain rank rare rate read real rest rice rich ride ring rise risk road rock role roll roof room root rose
rule rush safe said sail sale salt same sand save seat seed seek seem seen self sell send sent ship shoe shop shot show shut
sick side sign sing site size skin slip slow snow soft soil sold some song soon sort soul spot star stay step stop such suit
sure take tale talk tall tank task team tell tend tent term test text than that them then they thin this thus till time tiny
told tone tool tour town tree trip true turn type unit upon used user vary vast very vote wage wait wake walk wall want warm
wash wave weak wear week well went were west what when whom wide wife wild will wind wine wing wire wise wish with wood word
wore work yard yeah year your zone
"""


def letter_readings() -> dict[str, tuple[str, ...]]:
    """Return the readings of each character that looks like Latin letters: the letters in lower case that it may stand for."""
    found: dict[str, dict[str, None]] = {}

    def add(character: str, *read_as: str) -> None:
        found.setdefault(character, {}).update(dict.fromkeys(read_as))

    for letter in ALPHABET:
        for character in (letter, letter.upper()):
            add(character, letter)
    for first in RUNS:
        for place, letter in enumerate(ALPHABET):
            add(chr(first + place), letter, *("l" if letter == "i" else ""))
    for letters in (LETTERS, LIGATURES):
        for letter, characters in letters.items():
            for character in characters:
                add(character, letter)
    for first in GREEK_RUNS:
        for place, plain in enumerate(GREEK):
            add(chr(first + place), *found.get(plain, ()))
    return {character: tuple(read_as) for character, read_as in found.items() if read_as}
